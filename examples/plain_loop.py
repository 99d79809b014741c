"""PPO as a plain PyTorch loop on one base: everything between prompts and optimizer step is here to be edited.

python examples/plain_loop.py path/to/model        # a folder with model and tokenizer
"""

import sys

import torch

import rlhf_engine as rl

folder, steps, beta = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20, 0.05
tokenizer = rl.load_tokenizer(folder)
# a transformers model or a PeftModel in memory serves in place of the folder; a PeftModel's adapter becomes the actor
model = rl.HydraModel.from_pretrained(folder, roles={k: v for k, v in rl.hydra_roles().items() if k != "reward"})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
prompts = [rl.encode_prompt(tokenizer, "Once upon a time")] * 16
ends = rl.eos_token_ids(tokenizer, model.backbone().model)
for step in range(steps):
    sampling = rl.SamplingConfig(max_completion_length=32, eos_token_ids=ends, seed=step)
    batch = rl.generate(model.eval(), prompts, sampling).batch
    texts = [tokenizer.decode(batch.completion_tokens(i)) for i in range(len(prompts))]
    scores = torch.tensor([float(text.count(" a ")) for text in texts])  # the reward
    old = model.score(batch, ("actor", "reference", "critic"))  # one forward of the base
    kl = old.logprobs_M - old.ref_logprobs_M
    rewards = rl.token_rewards(kl, scores, batch, beta)
    advantage, returns = rl.advantages(rewards, old.values_M, batch, gamma=1.0, lam=0.95)
    advantage, mask, n = rl.whitened(advantage, batch), torch.ones(len(kl), dtype=torch.bool), float(len(kl))
    for _ in range(2):  # epochs
        policy = rl.PolicyLoss(old_logprob_M=old.logprobs_M, advantage_M=advantage, mask_M=mask, denom=n)
        value = rl.ValueLoss(old_value_M=old.values_M, return_M=returns, mask_M=mask, denom=n, clip=0.2)
        actor, critic = model.train()(batch, (policy, value))
        (actor.loss + 0.1 * critic.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{step + 1}/{steps}  reward {scores.mean():.3f}  KL {kl.sum() / len(prompts):.3f} nats", flush=True)
if len(sys.argv) > 3:
    rl.save_pretrained(model, sys.argv[3])
