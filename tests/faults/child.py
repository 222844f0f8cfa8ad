# SPDX-License-Identifier: Apache-2.0
"""A party of one worker as a process of its own, without TensorFlow.

It joins, takes the first weights, and then trains as far as it is told, line by line of standard
input: a number is the round to stop before, an empty line means to leave. It says what it has done
in lines of JSON: {"round": 3} after each round, {"digest": "..."} when it has left.
"""

import json
import sys
from collections.abc import Iterable

from tests.faults.training import Setting, Trainer
from tf_hips.config import Tls, Uplink
from tf_hips.errors import TfHipsError
from tf_hips.ps import client as client_module
from tf_hips.ps.client import Client

DEADLINE_S = 90.0
GATHER_EVERY = 3  # rounds


def main() -> int:
    order = json.loads(sys.argv[1])
    setting, site = Setting.from_json(order["setting"]), order["site"]
    identity = Tls(**order["tls"]) if order["tls"] else None
    if order["resends"]:
        _forget_what_is_held()
    client = Client(Uplink(order["server"], site, identity, DEADLINE_S), order["run"], 1)
    try:
        _train(client, setting, site)
    except TfHipsError as error:
        _say(error=str(error))
        return 1
    finally:
        client.close()
    return 0


def _train(client: Client, setting: Setting, site: str) -> None:
    child = client.join(setting.up, setting.down, setting.seed).child
    assert setting.sites[child] == site
    client.agree_model(setting.shapes)
    trainer = Trainer(setting, child)
    trainer.weights = client.first_sync(trainer.weights)
    _say(joined=child)
    number = 0
    for line in sys.stdin:
        if not line.strip():
            break
        while number < int(line):
            trainer.apply(client.exchange(number, trainer.packets(number)))
            _say(round=number)
            number += 1
            if number % GATHER_EVERY == 0:
                values = client.gather(number // GATHER_EVERY - 1, "site", site.encode())
                assert values == [one.encode() for one in setting.sites]
    client.leave()
    _say(digest=trainer.digest())


def _forget_what_is_held() -> None:
    """Lets a call that is repeated send all packets again, whatever the server says that it has."""
    resume = client_module._Exchange.resume

    def forgetful(self: client_module._Exchange, held: Iterable[int]) -> None:
        resume(self, ())

    client_module._Exchange.resume = forgetful  # type: ignore[method-assign]


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
