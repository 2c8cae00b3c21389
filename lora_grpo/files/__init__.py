"""Crash-safe file I/O: atomic writes, one process per folder, and large tensors read in blocks.

atomic.write_json(folder / "run.json", record)          # flushed, then renamed into place
with atomic.new_folder(run / "adapter") as staging:     # the folder appears when the block ends
    model.save_pretrained(staging)
with lock.holding(output_dir):                          # exit code 2 if another process holds the lock
    for name, tensor in model_tensors(base).items():    # names, dtypes and shapes; no data
        tensor.rows(0, 1024)                            # reads only these rows

atomic.py       files and folders that are complete or absent, with a checksum manifest
disk.py         errors for a full disk, before and during a write
json_files.py   JSON objects and JSON Lines, from users and from interrupted runs
lock.py         one process per folder
tensors.py      safetensors files, read and written in blocks of rows
"""

from lora_grpo.files import atomic, disk, json_files, lock
from lora_grpo.files.tensors import (
    INDEX,
    ITEM_SIZES,
    TORCH_DTYPES,
    Rows,
    StoredTensor,
    TensorWriter,
    file_tensors,
    model_tensors,
    row_blocks,
    same_values,
)

__all__ = [
    "INDEX",
    "ITEM_SIZES",
    "TORCH_DTYPES",
    "Rows",
    "StoredTensor",
    "TensorWriter",
    "atomic",
    "disk",
    "file_tensors",
    "json_files",
    "lock",
    "model_tensors",
    "row_blocks",
    "same_values",
]
