"""Many policies on one frozen base: their life, joint passes, and the thread that draws for all of them.

Policies      the policies of a base: made, forked, saved, evicted, trained and removed
PolicyThread  the thread in which all of them draw and learn, in fair shares
Pass          a policy, a batch and what is computed from it, for `PolicyThread.compute`
"""

from rlhf_engine.policy.joint import Pass
from rlhf_engine.policy.pool import Policies
from rlhf_engine.policy.thread import PolicyThread

__all__ = ["Pass", "Policies", "PolicyThread"]
