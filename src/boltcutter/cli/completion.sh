# Completes the arguments of `boltcutter`, by $_boltcutter_python, and of scripts; $_boltcutter_scripts lists those of all
# projects for which this was evaluated: interpreter, tab, path. Both are set before.
#
# argcomplete and shtab complete what an argparse parser declares. Here the keys depend on the options given so far,
# and completion continues after a dot, after = and after a comma in [a,b]. shtab's static lists cannot do so, and
# argcomplete completes `python scripts/train.py` only with a hook for all programs and a marker in each script.
# Not by -m, which would import modules of the working directory, whoever has put them there.
_boltcutter_start='import sys; sys.path = [path for path in sys.path if path]
from boltcutter.cli.commands import main; main()'
_boltcutter_find() {  # sets python, if this is one of these scripts; no other program is ever started
    local entry
    for entry in "${_boltcutter_scripts[@]}"; do
        python="${entry%$'\t'*}"
        [[ "$1" -ef "${entry#*$'\t'}" ]] && return
    done
    return 1
}
_boltcutter_parse() {  # sets program, which completes, and given, its arguments so far
    local word python
    program=() given=()
    if [[ "${1##*/}" == boltcutter ]]; then
        program=("$_boltcutter_python" -c "$_boltcutter_start" ${2:+"$2"})
        shift $(($# < 2 ? $# : 2))
    else
        while (($#)) && [[ "$1" != *.py ]]; do shift; done
        _boltcutter_find "${1:-}" || return 1
        program=("$python" "$1")
        shift
    fi
    for word in "$@"; do given+=("${word//[\"\']/}"); done
}
_boltcutter_bash() {
    local line="${COMP_LINE:0:COMP_POINT}" word text
    local current="${line##*[[:space:]]}"
    local breaks="${COMP_WORDBREAKS//[^=:]/}"
    local kept="${breaks:+${current%"${current##*[$breaks]}"}}"
    local -a words program given described=()
    read -a words <<<"${line%"$current"}"  # without -r, a backslash quotes a space
    COMPREPLY=()
    _boltcutter_parse "${words[@]}" || return 0
    # Readline replaces what follows the last = or :, but all of a word in quotes.
    case "$current" in [\"\']*) current="${current:1}" kept="" ;; esac
    while IFS=$'\t' read -r word text; do
        COMPREPLY+=("${word#"$kept"}")
        described+=("${word#"$kept"}${text:+  $text}")
        case "$word" in *= | *. | *=\[*) compopt -o nospace 2>/dev/null ;; esac
    done < <("${program[@]}" --complete "$current" "${given[@]}" 2>/dev/null)
    # Descriptions are shown in lists (33 and 63 are ! and ?), but must not be inserted as part of a single candidate.
    case "$COMP_TYPE" in 33 | 63) ((${#COMPREPLY[@]} < 2)) || COMPREPLY=("${described[@]}") ;; esac
}
_boltcutter_zsh() {
    local word text
    local -a open closed open_texts closed_texts program given
    if ! _boltcutter_parse "${(Q@)words[1,CURRENT - 1]}"; then
        "${_boltcutter_before[$service]:-_default}" "$@"
        return
    fi
    while IFS=$'\t' read -r word text; do
        case "$word" in
            *= | *. | *=\[*) open+=("$word") open_texts+=("$word${text:+  $text}") ;;
            *) closed+=("$word") closed_texts+=("$word${text:+  $text}") ;;
        esac
    done < <("${program[@]}" --complete "${PREFIX//\\/}" "${given[@]}" 2>/dev/null)
    compadd -Q -S "" -d open_texts -- "${open[@]}"
    compadd -Q -d closed_texts -- "${closed[@]}"
    (( ${#open[@]} + ${#closed[@]} )) || { compset -P "*=" && _files; }
}
if [[ -n "${ZSH_VERSION:-}" ]]; then
    whence compdef >/dev/null || { autoload -Uz compinit && compinit -u -D; }
    typeset -gA _boltcutter_before
    for _boltcutter_name in python python3 torchrun; do
        [[ "${_comps[$_boltcutter_name]:-}" == _boltcutter_zsh ]] ||
            _boltcutter_before[$_boltcutter_name]="${_comps[$_boltcutter_name]:-}"
    done
    compdef _boltcutter_zsh python python3 torchrun boltcutter
else
    complete -o bashdefault -o default -F _boltcutter_bash python python3 torchrun boltcutter
fi
