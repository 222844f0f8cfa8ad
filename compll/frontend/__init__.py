# SPDX-License-Identifier: Apache-2.0
"""From text to the typed IR: lexer, parser, check. Every diagnostic comes from here."""
