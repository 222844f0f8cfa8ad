# SPDX-License-Identifier: Apache-2.0
"""A second party without Keras, which sends what a test says, when the test says so."""

import threading

import numpy as np

from tf_hips import config
from tf_hips.ops import compressor, native
from tf_hips.ps.client.client import Client

WAIT_S = 30.0


class PlainParty:
    """A party of exact packets in a run whose parties do not wait for each other."""

    def __init__(self, address, run, site="south"):
        self._client = Client(config.Uplink(address, site), run, 1)
        self._round = 0
        self._joining = self._start(lambda: self._client.join("fp32", "fp32", 7))
        self._beginning = None

    def begin(self, shapes, weights):
        """Has a model of these tensors, and weights like these: as soon as the others begin."""

        def begin():
            self._joining.join(WAIT_S)
            self._client.first_sync(weights)
            self._client.agree_model(shapes)

        self._beginning = self._start(begin)

    def push(self, values):
        """Makes one round."""
        self._beginning.join(WAIT_S)
        fp32 = compressor.parse("fp32")
        packets = [native.encode(fp32, one.reshape(-1), native.Key(0, 0, 0)) for one in values]
        self._client.exchange(self._round, np.concatenate(packets))
        self._round += 1

    def leave(self):
        """Leaves the run."""
        self._client.leave()

    @staticmethod
    def _start(action):
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        return thread
