"""Behind TRL: our kernels in its trainers (`patch`), from 1.15 on.

TRL is an optional dependency (`pip install 'rlhf-engine[trl]'`); nothing outside this package imports it.
"""

from rlhf_engine.integrations.trl.seam import Patch, patch

__all__ = ["Patch", "patch"]
