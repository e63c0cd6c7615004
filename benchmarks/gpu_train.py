"""The app, trained on several models one after the other; `gpu_train.py MODEL:EPOCHS … -- ARGUMENTS` of `app.train`.

One process for all models, so that a launcher and `import torch` cost their seconds once; each model has a folder
of its own in `$JOB_DIR`.
"""

import os
import sys
from pathlib import Path

from app import train

cut = sys.argv.index("--")
models, arguments = sys.argv[1:cut], sys.argv[cut + 1 :]
folder = os.environ["JOB_DIR"]
for entry in models:
    model, epochs = entry.split(":")
    os.environ["JOB_DIR"] = str(Path(folder, model))
    sys.argv = ["app.train", "--model", model, "--epochs", epochs, *arguments]
    train.main()
