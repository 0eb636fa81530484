"""Write without end, in one way or the other. Argument: `big` or `small`; prints the bytes written and the errno."""

import os
import sys

MIB = 1 << 20
MIB_MAX = 96


def big() -> tuple[int, int]:
    written = 0
    with open("/var/big", "wb", buffering=0) as file:
        while written < MIB_MAX * MIB:
            try:
                written += file.write(bytes(MIB))
            except OSError as error:
                return written, error.errno or 0
    return written, 0


def small() -> tuple[int, int]:
    """Files that a file system may keep beside its data."""
    written = 0
    while written < MIB_MAX * MIB:
        try:
            os.makedirs(f"/var/small/{written // MIB}", exist_ok=True)
            with open(f"/var/small/{written // MIB}/{written}", "wb", buffering=0) as file:
                written += file.write(bytes(1800))
        except OSError as error:
            return written, error.errno or 0
    return written, 0


if __name__ == "__main__":
    print(*{"big": big, "small": small}[sys.argv[1]]())
