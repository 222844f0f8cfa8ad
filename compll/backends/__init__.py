# SPDX-License-Identifier: Apache-2.0
"""What programs become: results (reference), C++ codecs (cpp), TensorFlow operations (tf_op)."""
