"""A small GPT on characters, as in nanoGPT: `orchestrate run --nodes 2 nanogpt.py --out_dir='$JOB_DIR/out'`.

Settings are the names below: `--max_iters=500`. Without torchrun's variables, it trains in a single process.
"""

import os
import sys

import torch
from data import digest
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "out"
init_from = "auto"  # "scratch", "resume", or "auto": resume if there is a checkpoint
max_iters, eval_interval = 200, 20
gradient_accumulation_steps, batch_size, block_size = 4, 8, 32
n_layer, n_head, n_embd = 2, 4, 32
learning_rate, grad_clip = 3e-3, 1.0
config = {name: value for name, value in globals().items() if isinstance(value, (int, float, str)) and name[0] != "_"}
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    if name not in config:
        sys.exit(f"unknown setting: {argument}")
    globals()[name] = type(config[name])(value)

ddp = int(os.environ.get("RANK", -1)) != -1
rank, world_size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if ddp else (0, 1)
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
if device != "cpu":
    torch.cuda.set_device(device)
if ddp:
    init_process_group("nccl" if device != "cpu" else "gloo")
assert gradient_accumulation_steps % world_size == 0, "all processes need the same number of micro-batches"
gradient_accumulation_steps //= world_size
torch.manual_seed(1337 + rank)  # each process draws its own batches

text = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
chars = sorted(set(text))
data = torch.tensor([chars.index(char) for char in text])


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return `batch_size` random pieces of the text, and the same pieces one character later."""
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x, y = (torch.stack([data[i + shift : i + shift + block_size] for i in starts]) for shift in (0, 1))
    return x.to(device), y.to(device)


class GPT(nn.Module):
    """Predict the next character."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        block = nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, 0.0, "gelu", batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(block, n_layer, nn.LayerNorm(n_embd), enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block_size), persistent=False)

    def forward(self, x, y):
        """Return the cross-entropy of the predictions for `x`."""
        logits = self.lm_head(self.h(self.wte(x) + self.wpe.weight, self.mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


model = raw_model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
iter_num, ckpt = 0, os.path.join(out_dir, "ckpt.pt")
if init_from == "resume" or (init_from == "auto" and os.path.exists(ckpt)):
    state = torch.load(ckpt, map_location=device)
    raw_model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    iter_num = state["iter_num"]
    print(f"resumed after iter {iter_num}", flush=True)
if ddp:
    model = DDP(model)
while iter_num < max_iters:
    for micro_step in range(gradient_accumulation_steps):
        if ddp:  # gradients are averaged once per step, with the last micro-batch
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = model(*get_batch()) / gradient_accumulation_steps
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    iter_num += 1
    if rank == 0 and (iter_num % eval_interval == 0 or iter_num == max_iters):
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}", flush=True)
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        os.makedirs(out_dir, exist_ok=True)
        torch.save(state, f"{ckpt}.new")
        os.replace(f"{ckpt}.new", ckpt)  # a reader finds the old or the new checkpoint, never half of one
print(f"rank {rank} of {world_size}: {iter_num} steps, weights {digest(raw_model.state_dict())}", flush=True)
if ddp:
    destroy_process_group()
