"""The GPUs that tests/gpu_rig pretends to have."""

GPUS = [
    # Name, MiB listed by nvidia-smi, approximate GiB reported by torch (the driver keeps some), compute capability.
    ("NVIDIA GeForce RTX 4060", 8188, "7.63", "8.9"),
    ("NVIDIA GeForce RTX 3060", 12288, "11.63", "8.6"),
    ("Tesla T4", 15360, "14.74", "7.5"),
    ("NVIDIA GeForce RTX 4080", 16376, "15.69", "8.9"),
    ("NVIDIA GeForce RTX 4090", 24564, "23.64", "8.9"),
    ("NVIDIA GeForce RTX 5090", 32607, "31.36", "12.0"),
    ("NVIDIA H100 80GB HBM3", 81559, "79.18", "9.0"),
]
