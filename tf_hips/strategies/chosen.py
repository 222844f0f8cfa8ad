# SPDX-License-Identifier: Apache-2.0
"""What a script and its run's configuration say together."""

from tf_hips import config as configuration
from tf_hips.errors import ConfigError
from tf_hips.ops.compressor import Compressor, resolve


def chosen_compression(given: Compressor | str | None, run: configuration.Run) -> Compressor | None:
    """The compression of a run: what its script gives, or else what its configuration names.

    Raises:
        ValueError, TypeError: what the script gives is no compression.
        ConfigError: what the configuration names is none, or is not what the script gives.
    """
    own = None if given is None else resolve(given, "compression")
    if run.compression is None:
        return own
    try:
        named = resolve(run.compression)
    except ValueError as error:
        raise ConfigError(f"`compression` of the run's configuration: {error}") from error
    if own is not None and own != named:
        raise ConfigError(
            "`compression` must be the same in the script and in the run's configuration, or be in "
            f"one of them only. Received: {own.text} in the script, {named.text} in the "
            "configuration"
        )
    return named


def chosen_intra(given: str | None, run: configuration.Run) -> str:
    """How the workers of a party meet: as the script says, or else as they were started.

    Raises:
        ValueError: the script says something else than there is.
        ConfigError: they were started otherwise.
    """
    if given is not None and given not in configuration.INTRAS:
        raise ValueError(
            f"`intra` must be one of {', '.join(configuration.INTRAS)}. Received: intra={given!r}"
        )
    if given is not None and run.intra is not None and given != run.intra:
        raise ConfigError(
            f"`intra` must be as the workers were started. Received: intra={given!r} in the "
            f"script, {run.intra!r} in the configuration"
        )
    return given or run.intra or "horovod"
