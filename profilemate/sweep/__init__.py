# SPDX-License-Identifier: Apache-2.0
"""``profilemate sweep``: run a command under many settings, each run a profiled session of its own.

Nothing of this runs inside vLLM. ``analysis.sweep`` reads the results of the runs, from the
folder that is written here.
"""
