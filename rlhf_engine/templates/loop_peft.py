"""A plain loop over a PeftModel whose LoRA layers run on rlhf-engine's kernels."""

import json

import matplotlib
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_engine import fuse_lora

matplotlib.use("Agg")
from matplotlib import pyplot

tokenizer = AutoTokenizer.from_pretrained("model")
with open("pairs.jsonl") as file:
    rows = [json.loads(line) for line in file]
texts = [f"{row['prompt']} {row['chosen']} {tokenizer.eos_token}" for row in rows]

lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(AutoModelForCausalLM.from_pretrained("model"), lora)
fusion = fuse_lora(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
losses = []
for step in range(60):
    batch = tokenizer(texts[24 * step : 24 * (step + 1)], return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 10 == 0 or step == 59:
        print(f"step {step + 1}: loss {losses[-1]:.3f}")
model.save_pretrained("runs/peft")
pyplot.plot(losses)
pyplot.xlabel("step")
pyplot.ylabel("cross-entropy, nats per token")
pyplot.savefig("runs/peft/curve.png")
