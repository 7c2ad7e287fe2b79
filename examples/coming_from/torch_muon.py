"""A script written for ``torch.optim.Muon``: the import is changed, and nothing else.

    python examples/coming_from/torch_muon.py --folder runs/muon
    torchrun --nproc-per-node 2 examples/coming_from/torch_muon.py --fs 2 --folder runs/muon --steps 80
    torchrun --nproc-per-node 4 examples/coming_from/torch_muon.py --fs 2 --tp 2
    torchrun --nproc-per-node 2 examples/coming_from/torch_muon.py --dp 2

Muon takes matrices alone, so ``torch.optim.AdamW`` has the LM head, the embeddings, the gains and the biases.
Both optimizers are in one checkpoint.
"""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer

from layouts import Job, Model, parameters_by_kind
from oxidion.compat.torch import Muon  # was: from torch.optim import Muon


def build_optimizers(model: nn.Module) -> list[Optimizer]:
    """Muon for the hidden matrices, AdamW for the others."""
    matrices, head, rest = parameters_by_kind(model)
    muon = Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW([*head, *rest], lr=0.003)
    return [muon, adamw]


def main() -> None:
    """Trains until the last step, from the newest checkpoint on."""
    job = Job(__doc__)
    model = job.distribute(Model())
    optimizers = build_optimizers(model)
    for step in range(job.resume(model, optimizers), job.options.steps):
        loss = model(job.batch(step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        job.report(step, loss)
        if job.is_to_save(step + 1):
            job.save(step + 1, model, optimizers)
    job.close()


if __name__ == "__main__":
    main()
