"""Train several models with the app, one after the other; `gpu_train.py MODEL:EPOCHS … -- ARGUMENTS` of `app.train`.

One process trains all models, so the launcher and `import torch` are paid for once; each model has its own folder in
`$JOB_DIR`.
"""

import os
import sys
from pathlib import Path

from app import train

separator = sys.argv.index("--")
models, arguments = sys.argv[1:separator], sys.argv[separator + 1 :]
folder = os.environ["JOB_DIR"]
for entry in models:
    model, epochs = entry.split(":")
    os.environ["JOB_DIR"] = str(Path(folder, model))
    sys.argv = ["app.train", "--model", model, "--epochs", epochs, *arguments]
    train.main()
