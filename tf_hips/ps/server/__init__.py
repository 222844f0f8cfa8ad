# SPDX-License-Identifier: Apache-2.0
"""The process: listens, serves one run after another, stands below another server.

    server         one session after another, from the first that listens to the end
    foreground     a server in the foreground of a process
    status         the run as JSON for `tf-hips status`, and as metrics for Prometheus
    uplink         a party's server at the server above it, for all its children
    relays         what that server passes on, as it comes from its children
    listening      what a server's socket is opened with
    memory         how the C library keeps the memory of the process
    state_server   ESync's state server: the paper's rule over HTTP
    bounded_http   its connections and the times of their requests, which are bounded

A command line starts `foreground` or `state_server`; tests and benchmarks a `server.Server`.
"""
