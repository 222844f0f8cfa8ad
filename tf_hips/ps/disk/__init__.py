# SPDX-License-Identifier: Apache-2.0
"""What lets a run outlive its server: a folder with a journal and snapshots.

    durable       sessions that are recorded in a folder, and restored from it
    journal       the folder of a run: a journal that grows, snapshots that bound it
    file_format   one file: a header, then records with lengths and checksums
    past_files    the past (`terms.past`) in files

In which words a session is recorded, `terms.recorder` says.
"""
