"""On PYTHONPATH of a vLLM process with TRITON_INTERPRET=1: Triton counts as available on a machine without a GPU.

vLLM's native speculators need Triton kernels; the interpreter runs them, slowly, on a CPU. For tests only.
"""

import os
import sys

if os.environ.get("TRITON_INTERPRET") == "1":
    import importlib.abc
    import importlib.util

    class _BackendFirst(importlib.abc.MetaPathFinder):
        """Registers a CPU backend at the moment vLLM is about to look for one."""

        def find_spec(self, name, path=None, target=None):
            if name != "vllm.triton_utils.importing":
                return None
            sys.meta_path.remove(self)
            import triton.backends

            class _Driver:
                @staticmethod
                def is_active():
                    return True

            triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Driver)
            return importlib.util.find_spec(name)

    sys.meta_path.insert(0, _BackendFirst())
