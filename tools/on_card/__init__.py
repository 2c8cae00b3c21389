"""What tools/card.py runs on a machine with a GPU.

sides.py         the runs of each part, as commands, and what is read from their folders
watched.py       runs a recipe inside a small card, or with the record of torch's allocator
memory_trace.py  the peak of each phase in that record, and what held the memory
small_card.py    a card that looks smaller: the balloon, and what programs are told about the memory
mem_get_info.c   the part of it for compiled programs
rivals.py        the same training with TRL's own vLLM mode, and as Unsloth's notebooks do it
"""
