"""Error feedback: what a lossy codec lost of one message is added to the next, so a codec loses nothing for good.

    p_t = v_t + e_t          v_t: what the client would send       e_0 = 0
    m_t = C(p_t)             C: a codec, there and back
    e_{t+1} = p_t − m_t      so that  Σ_t m_t + e_T = Σ_t v_t

Sources: Stich, Cordonnier & Jaggi, "Sparsified SGD with memory" (arXiv 1809.07599) and Karimireddy et al., "Error
feedback fixes SignSGD and other gradient compression schemes" (ICML 2019, arXiv 1901.09847), which shows convergence
at the rate of SGD for every C with ‖C(p) − p‖² ≤ (1 − δ)‖p‖².
Where we differ: v_t is the difference a client trained in a round, not a gradient times its step size, and a client
that sits out a round keeps its e. The sums are in float32, so the equality holds to its rounding. A client is not told
what became of its message: one that the server drops, or whose round is abandoned, is lost, but for its e.
"""

import numpy as np

from nestling.codec.form import Memory
from nestling.core.errors import ContextError
from nestling.core.vectors import Vector

ERROR = "error"
"""Name of e in an encoder's memory."""


def compensated(vector: Vector, memory: Memory) -> Vector:
    """What to encode in place of `vector`: float32[n], `vector` and the error kept from the message before.

    Raises `ContextError` if the error kept is not one of such a vector.

    >>> compensated(np.array([1, 2], np.float32), {"error": np.array([0.5, 0], np.float32)})
    array([1.5, 2. ], dtype=float32)
    """
    error = memory.get(ERROR)
    if error is None:
        return vector
    if error.dtype != np.float32 or error.shape != vector.shape:
        raise ContextError(
            f"is {error.dtype} of shape {error.shape}, the vector is float32 of shape {vector.shape}",
            where="error feedback",
            remedy="Was it kept by another run or adapter?",
        )
    with np.errstate(over="ignore"):  # the encoder refuses what is not finite
        return vector + error


def keep_error(compensated: Vector, decoded: Vector, memory: Memory) -> None:
    """Keep what the message lost, float32[n], for the next one; call it once the message is made.

    `decoded` is what a receiver makes of the message that was encoded from `compensated`.

    >>> memory = {}
    >>> keep_error(np.array([1.5, 2], np.float32), np.array([1, 2], np.float32), memory)
    >>> memory["error"]
    array([0.5, 0. ], dtype=float32)
    """
    memory[ERROR] = compensated - decoded
