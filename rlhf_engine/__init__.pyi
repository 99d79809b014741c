"""Names that `rlhf_engine` lends, each from its module: the one list, for type checkers and for Python."""

from rlhf_engine.algorithms.base import Algorithm as Algorithm
from rlhf_engine.algorithms.ppo import advantages as advantages
from rlhf_engine.algorithms.ppo import token_rewards as token_rewards
from rlhf_engine.algorithms.sequences import whitened as whitened
from rlhf_engine.config import SFTConfig as SFTConfig
from rlhf_engine.config import TrainConfig as TrainConfig
from rlhf_engine.data.tokenizer import encode_prompt as encode_prompt
from rlhf_engine.data.tokenizer import eos_token_ids as eos_token_ids
from rlhf_engine.data.tokenizer import load_tokenizer as load_tokenizer
from rlhf_engine.errors import ConfigError as ConfigError
from rlhf_engine.errors import EngineError as EngineError
from rlhf_engine.hydra import HydraModel as HydraModel
from rlhf_engine.hydra import PackedBatch as PackedBatch
from rlhf_engine.hydra import PolicyLoss as PolicyLoss
from rlhf_engine.hydra import RoleSpec as RoleSpec
from rlhf_engine.hydra import SlotConfig as SlotConfig
from rlhf_engine.hydra import ValueLoss as ValueLoss
from rlhf_engine.hydra import hydra_roles as hydra_roles
from rlhf_engine.hydra import load_pretrained as load_pretrained
from rlhf_engine.hydra import save_pretrained as save_pretrained
from rlhf_engine.integrations.peft import fuse_lora as fuse_lora
from rlhf_engine.rollout import EngineOptions as EngineOptions
from rlhf_engine.rollout import Request as Request
from rlhf_engine.rollout import RolloutEngine as RolloutEngine
from rlhf_engine.rollout import SamplingConfig as SamplingConfig
from rlhf_engine.rollout.generate import generate as generate
from rlhf_engine.training.rl import RlTrainer as RlTrainer
from rlhf_engine.training.rl_policy import RlPolicy as RlPolicy
from rlhf_engine.training.run import Policy as Policy
from rlhf_engine.training.sft import SftTrainer as SftTrainer

__version__: str
__all__: list[str]

def __dir__() -> list[str]: ...
