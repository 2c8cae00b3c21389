"""Crash-safe file I/O: atomic writes, one process per folder, and large tensors read in blocks.

atomic.write_json(folder / "run.json", record)          # flushed, then renamed into place
with atomic.new_folder(run / "adapter") as staging:     # the folder appears when the block ends
    model.save_pretrained(staging)
with lock.holding(output_dir):                          # exit code 2 if another process holds the lock
    for name, tensor in model_tensors(base).items():    # names, dtypes and shapes; no data
        tensor.rows(0, 1024)                            # reads only these rows

atomic.py       atomic writes of files and folders, and checksum manifests
disk.py         reports full or too small disks in one line
json_files.py   JSON objects and JSON Lines, from users and from interrupted runs
local_paths.py  finds paths of this machine in texts
lock.py         one process per folder
python_file.py  imports users' Python files
text.py         tables, and escaping of text for terminals and pages
tensors.py      safetensors files, read and written in blocks of rows
"""

from lora_grpo.files import atomic, disk, json_files, local_paths, lock, python_file
from lora_grpo.files.tensors import (
    DTYPES,
    INDEX,
    ITEM_SIZES,
    Rows,
    StoredTensor,
    TensorEntry,
    file_tensors,
    main_dtype,
    model_tensors,
    row_blocks,
    same_values,
    unquantized,
    write_tensors,
)
from lora_grpo.files.text import markdown, markdown_table, printable, text_table
