# SPDX-License-Identifier: Apache-2.0
"""How are a fleet's sessions read: by processes here, or by tasks on a Ray cluster?

``analysis.fleet`` says what is found in them.
"""
