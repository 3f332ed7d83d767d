# SPDX-License-Identifier: Apache-2.0
"""What profilemate promises, tried with real faults and at length: ``python -m attacks``."""
