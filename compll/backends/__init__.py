# SPDX-License-Identifier: Apache-2.0
"""What a program is turned into: results (reference), a C++ codec (cpp), TensorFlow operations (tf_op)."""
