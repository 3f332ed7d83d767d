# SPDX-License-Identifier: Apache-2.0
"""A session in the formats of other tools: what ran as a trace, and what was asked for as a load.

A module each for the formats, one for which part of a session goes into them, and one for what a
request's phases are.
"""
