"""PPO as a plain PyTorch loop on one base: everything between prompts and optimizer step is here to be edited.

python examples/plain_loop.py path/to/model        # a folder with model and tokenizer
"""

import sys

import torch

from rlhf_engine.algorithms.ppo import advantages, token_rewards
from rlhf_engine.algorithms.sequences import whitened
from rlhf_engine.hydra import HydraModel, PolicyLoss, ValueLoss, hydra_roles, save_pretrained
from rlhf_engine.rollout import SamplingConfig, generate
from rlhf_engine.tokenizing import encode_prompt, eos_token_ids, load_tokenizer


def reward(text: str) -> float:
    return float(text.count(" a "))


folder, steps, beta = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20, 0.05
tokenizer = load_tokenizer(folder)
model = HydraModel.from_pretrained(folder, roles={k: v for k, v in hydra_roles().items() if k != "reward"})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
prompts = [encode_prompt(tokenizer, "Once upon a time")] * 16
ends = eos_token_ids(tokenizer, model.backbone().model)
for step in range(steps):
    model.eval()
    sampling = SamplingConfig(max_completion_length=32, eos_token_ids=ends, seed=step)
    batch = generate(model, prompts, sampling).batch
    texts = [tokenizer.decode(batch.completion_tokens(i)) for i in range(len(prompts))]
    scores = torch.tensor([reward(text) for text in texts])
    old = model.score(batch, ("actor", "reference", "critic"))  # one forward of the base
    kl = old.logprobs_M - old.ref_logprobs_M
    rewards = token_rewards(kl, scores, batch, beta)
    advantage, returns = advantages(rewards, old.values_M, batch, gamma=1.0, lam=0.95)
    advantage = whitened(advantage, batch)
    mask, n = torch.ones(len(kl), dtype=torch.bool), float(len(kl))
    for _ in range(2):  # epochs
        policy = PolicyLoss(old_logprob_M=old.logprobs_M, advantage_M=advantage, mask_M=mask, denom=n)
        value = ValueLoss(old_value_M=old.values_M, return_M=returns, mask_M=mask, denom=n, clip=0.2)
        found, critic = model.train()(batch, (policy, value))
        (found.loss + 0.1 * critic.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(
        f"{step + 1}/{steps}  reward {scores.mean():.3f}  KL {kl.sum() / len(prompts):.3f} nats per answer", flush=True
    )
if len(sys.argv) > 3:
    save_pretrained(model, sys.argv[3])
