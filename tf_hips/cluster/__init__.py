# SPDX-License-Identifier: Apache-2.0
"""A cluster as one file: its servers and parties, what they are told, and how they are started.

`description` reads `cluster.yaml`; `layout` says what lies where on a machine; `fleet` copies,
starts and ends over ssh; `deploy` writes files for systemd, Kubernetes, Horovod, SkyPilot and a
container image. Nothing here imports TensorFlow.
"""
