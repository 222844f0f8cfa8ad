# SPDX-License-Identifier: Apache-2.0
"""The parameter server over gRPC: rounds, chunks, children, mutual TLS. Imports no TensorFlow.

Logic is apart from transport: `store`, `rule`, `session`, `weights`, `model` and `wire` open no
socket; `server` and `client` are thin callers of them, `tls` knows certificates, `sockets` counts
bytes and finds out why a connection fails. A run that outlives its server is kept by `durable`, in
files of `journal` and `disk.file_format`.
"""

import os

# gRPC prints lines of its own for every handshake that fails; our errors say it in one sentence.
# It reads this when it is imported, so a user's own setting wins.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
