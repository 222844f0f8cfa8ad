# SPDX-License-Identifier: Apache-2.0
"""Who is who: certificates, and what is wrong with a connection.

    tls          mutual TLS: credentials for gRPC, and the name in a certificate
    expiry       when certificates end, and who hears of it in time
    revocation   certificates that are refused, from a file that may change
    authority    makes certificates, keeps a list of them, revokes them
    diagnosis    why a connection fails, in one sentence

`tf-hips certs` is `authority`; every connection asks `tls`.
"""
