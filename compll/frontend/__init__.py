# SPDX-License-Identifier: Apache-2.0
"""From text to the typed IR: lexer, parser, check. All that a specification can do wrong is reported here."""
