# SPDX-License-Identifier: Apache-2.0
"""The exceptions of tf_hips, one per kind of trouble a caller can act on.

Bad arguments are plain `ValueError` or `TypeError`; the classes here are for what an argument check
cannot see: files, libraries, peers and packets. Every message says what was expected and what came.
"""


class TfHipsError(Exception):
    """Base of all errors that tf_hips raises itself."""


class ConfigError(TfHipsError, ValueError):
    """A configuration file or value is wrong; names the file, the key and the nearest valid one."""


class LibraryError(TfHipsError, ImportError):
    """A native library is missing or built for another TensorFlow; names the command that helps."""


class PacketError(TfHipsError, ValueError):
    """A packet is truncated, too long, or was made by another codec."""


class PeerError(TfHipsError, ConnectionError):
    """A peer is gone, late or speaks something else; names the peer, the call, what was awaited."""


class ProtocolError(TfHipsError, RuntimeError):
    """Two sides disagree about the run; names what was expected and what came."""


class NonFiniteError(TfHipsError, ArithmeticError):
    """A gradient holds NaN or an infinity and `nonfinite="raise"` is set."""
