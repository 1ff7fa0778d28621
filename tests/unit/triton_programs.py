"""Compile every kernel for a GPU with Triton's own assembler, without a GPU or a driver.

This is a separate program, because a process either compiles kernels or interprets them. Triton is
imported only when the program runs, because test collection imports this file everywhere.
"""

import argparse
import importlib

B = 2048
# each kernel's arguments, in the order of its parameters; numbers are compile-time constants
SIGNATURES = {
    "_swap_accumulate": ("*fp32", "*fp32", "*i32", "i32", "i32", B, 1),
    "_count_above": ("*i32", "*i32", "i32", "i32", B),
    "_compact": ("*i32", "*i64", "*i64", "*i32", "i32", "i32", B),
    "_count_digits": ("*i32", "*i64", "*i64", "i32", "i32", 8, B, 256),
    "_choose_digit": ("*i64", "*i64", 256),
    "_count_top": ("*i32", "*i64", "*i32", "i32", B),
    "_compact_top": ("*i32", "*i64", "*i64", "*i64", "*i64", "i32", B),
    "_scatter": ("*fp32", "*i64", "*fp32", "i32", B, -1),
    "_encode_indices": ("*i64", "*i32", "i32", "i32", "i32", B),
    "_count_ones": ("*u8", "*i32", "i32", "i32", B),
    "_decode_indices": ("*u8", "*i64", "*i64", "i32", "i32", "i32", "i32", B),
    "_encode_bf16": ("*i32", "*i16", "i32", B),
    "_decode_bf16": ("*i16", "*i32", "i32", B),
    "_encode_int8": (*("*fp32", "*fp32", "*i8", "i32", "i32", "fp32", "fp32", "i32"), 16, 128),
    "_quantise": (
        *("*fp32", "*fp32", "*u8", "*u8", "*fp32", "*fp32", "i32", "i32", "fp32"),
        *(True, 3, 4, 512, 9),
    ),
    "_decode_levels": (
        *("*fp32", "*fp32", "*fp32", "*u8", "*fp32", *["i32"] * 5, "fp32"),
        *(B, 3, 2, True, -1, True),
    ),
    "_move": ("*fp32", "*fp32", "*fp32", "*i16", "i32", B, True, True, 1, 1),
    "_lengthen": (*["*fp32"] * 4, "i32", "i32", *["fp32"] * 4, B, True),
    "_decode_int8": ("*fp32", "*i8", "*fp32", "i32", "i32", "i32", B),
}


def compiled(kernel, types, capability):
    """Compile a kernel to machine code; return its PTX."""
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    named = dict(zip(kernel.arg_names, types, strict=True))
    source = compiler.ASTSource(
        fn=kernel,
        signature={n: t if isinstance(t, str) else "constexpr" for n, t in named.items()},
        constexprs={n: t for n, t in named.items() if not isinstance(t, str)},
    )
    result = compiler.compile(source, target=target, options={"enable_fp_fusion": False})
    assert result.asm["cubin"]
    return result.asm["ptx"]


def forms_of(types):
    """Return variants with 32-bit and 64-bit lengths, and with length 1, which becomes a constant."""
    return [tuple(length if t == "i32" else t for t in types) for length in ("i32", "i64", 1)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", type=int, default=80)
    capability = parser.parse_args().capability
    module = importlib.import_module("sparsync.kernels.triton")
    jitted = importlib.import_module("triton").JITFunction
    found = dict(vars(module))
    for name in ("levels", "moves"):
        found |= vars(importlib.import_module(f"sparsync.kernels.triton_{name}"))
    device = {name for name, value in found.items() if isinstance(value, jitted)}
    assert set(SIGNATURES) == device - {
        "_positions",
        "_keys",
        "_ones",
        "_decoded",
        "_sum_of_halves",
        "_quotient",
        "_root",
        "_rounded",
    }
    for kernel, types in SIGNATURES.items():
        for form in forms_of(types):
            ptx = compiled(found[kernel], form, capability)
            # flushed denormals, approximate division or contraction would change bits of the result
            wrong = [word for word in ("ftz", "div.full", "div.approx", "fma") if word in ptx]
            assert not wrong, f"{kernel} uses {wrong}"


if __name__ == "__main__":
    main()
