# Sourced by scripts/demo and scripts/test: makes .venv with the pinned versions, or finds it ready.
# Usage: set_up EXTRAS   (a comma-separated list of extras of pyproject.toml)

say() { printf '\n==> %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${SERVETWIN_PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    echo "servetwin needs Python 3.11 or newer; none was found (set SERVETWIN_PYTHON to its path)" >&2
    return 1
}

# What the installed state depends on: the pins, the project file, and the list of our modules
# (a strict editable install links files one by one, so a new file needs a new install).
fingerprint() {
    { cat pyproject.toml constraints.txt; git ls-files -co --exclude-standard -- \
        'sim/*' 'executor/*' 'kernels/*' 'workloads/*' 'dashboard/*' | sort; echo "$PWD"; } | git hash-object --stdin
}

installed() { .venv/bin/python -m pip show -q "$1" >/dev/null 2>&1; }

set_up() {
    local extras=$1 python stamp=.venv/.servetwin-ready want
    want="$extras $(fingerprint)"
    if [ -f "$stamp" ] && grep -qxF "$want" "$stamp"; then
        return 0
    fi
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python)
        say "making .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    if ! .venv/bin/python -c 'import importlib.metadata as m; assert m.version("torch").split("+")[0] == "2.13.0"' 2>/dev/null; then
        say "installing torch 2.13.0: about 200 MB as a CPU build, up to 3 GB if pip picks a CUDA build"
        # Alone and first: another package's requirement must not choose the build.
        .venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
    fi
    say "installing servetwin[$extras] with the versions of constraints.txt (about 500 MB on the first run)"
    .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "setuptools==84.2.1"
    .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt \
        -e ".[$extras]" --config-settings editable_mode=strict
    # One line per set of extras that is ready for this fingerprint.
    { [ -f "$stamp" ] && grep -F "$(fingerprint)" "$stamp" || true; echo "$want"; } >"$stamp.new"
    mv "$stamp.new" "$stamp"
}
