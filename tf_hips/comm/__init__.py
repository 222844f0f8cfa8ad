# SPDX-License-Identifier: Apache-2.0
"""Collectives over Horovod: the fast tier, inside one party.

`primitives` is the one door to Horovod; `partition` is plain arithmetic; `allreduce` composes both;
`launch` starts local ranks. Nothing is imported here, because `launch` and `partition` must load
without TensorFlow.
"""
