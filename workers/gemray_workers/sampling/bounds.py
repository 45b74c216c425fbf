"""What sampling fields may be, in a request as in a checkpoint's generation_config.json."""

from __future__ import annotations

MIN_TEMPERATURE = 1e-5
"""Below it logits / T leave float32's range; 0 itself is greedy."""
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
"""Beyond these, logits / penalty could leave float32's range."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256

TEMPERATURE_ALLOWED = f"0 (greedy), or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
TOP_P_ALLOWED = "0 < top_p <= 1"
REPETITION_PENALTY_ALLOWED = f"{MIN_REPETITION_PENALTY} <= value <= {MAX_REPETITION_PENALTY}"


def is_temperature(value: float) -> bool:
    """Whether requests may have it; NaN may not."""
    return value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


def is_top_p(value: float) -> bool:
    """Whether requests may have it; NaN may not."""
    return 0 < value <= 1


def is_repetition_penalty(value: float) -> bool:
    """Whether requests may have it; NaN may not."""
    return MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY
