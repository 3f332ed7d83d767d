# SPDX-License-Identifier: Apache-2.0
"""The commands of the command line, one module each.

Each module declares its options as a frozen dataclass, and has a plain function that takes them
and returns the exit code. The function's docstring is the command's help. ``app`` puts the
commands together. A helper of one command has the command's name in front, and ``shared`` has
what several commands use.
"""
