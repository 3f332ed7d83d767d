# SPDX-License-Identifier: Apache-2.0
"""The key behind a session's content and prefix ids.

By default it is the session's own, so the ids of two sessions never meet. Where the user gives a
secret, each engine's key is derived from that and from its *basis*: what has to be alike for two
engines to hash the same contents alike. Engines with the same secret and basis have the same ids,
and nobody can make them who lacks the secret.
"""

from __future__ import annotations

from hashlib import blake2b

from profilemate.format.session import Founding

KEY_BYTES = 32
_NAME_BYTES = 8


def derive_secret(secret: bytes) -> bytes:
    """What a session keeps of the user's secret, as long as it has journals. The secret itself
    cannot be found from it."""
    return blake2b(secret, digest_size=KEY_BYTES, person=b"contents").digest()


def key_of(founding: Founding, basis: str | None) -> bytes:
    """The key behind the ids of an engine with this basis; None: its hashes are its own."""
    if not founding.contents or basis is None:
        return founding.key
    return blake2b(
        basis.encode(), key=founding.contents, digest_size=KEY_BYTES, person=b"engine"
    ).digest()


def name_of(founding: Founding, basis: str | None) -> str | None:
    """The key's name, 16 hexadecimal digits, by which sessions with the same key find each other;
    None where the key is the session's own."""
    if not founding.contents or basis is None:
        return None
    key = key_of(founding, basis)
    return blake2b(key=key, digest_size=_NAME_BYTES, person=b"name").hexdigest()


def apart_because(founding: Founding, basis: str | None, of_engine: str | None) -> str | None:
    """Why the contents are the session's own, in one sentence; None where they are not.

    ``of_engine`` is the reason that its engine gave.
    """
    if founding.contents and basis is not None:
        return None
    if not founding.contents:
        return founding.contents_apart or (
            "VLLM_PROFILING_CONTENT_KEY is not set to a file's absolute path or to 'deployment'"
        )
    return of_engine or "no engine recorded"
