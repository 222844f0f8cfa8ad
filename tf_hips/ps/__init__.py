# SPDX-License-Identifier: Apache-2.0
"""The parameter server over gRPC: rounds, chunks, children, mutual TLS. Imports no TensorFlow.

Logic is apart from transport: `store`, `rule`, `session`, `model` and `wire` open no socket;
`server` and `client` are thin callers of them, `tls` and `uplink` know certificates and sockets.
"""
