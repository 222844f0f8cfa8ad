# SPDX-License-Identifier: Apache-2.0
# What `tf-hips up`, `down` and `sync` do on a machine of the cluster. It is sent with every command, as the text of
# `sh -c`, and needs a POSIX shell, tar, and setsid and flock (util-linux).
#
# A role's process is known by its number, its start time and the boot it belongs to, all three in the file `pid`: a
# number that another process has by now is never signalled. Lines for the operator's side begin with a mark of their
# own, because a login shell may print things.
set -u
umask 077

say() { printf '@tf-hips %s\n' "$*"; }

# start_of PID: state and start time of a process, in ticks since the boot; nothing if it is not there.
start_of() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 1,20; }

boot() { cat /proc/sys/kernel/random/boot_id; }

# Whether the process of the file `pid` lives; its number is left in $pid. A dead one that nobody has waited for, which
# is what a container without an init keeps, is not alive.
lives() {
  pid= began= on=
  [ -r pid ] || return 1
  read -r pid began on <pid
  [ -n "$on" ] && [ "$on" = "$(boot)" ] || return 1
  case $(start_of "$pid") in
    Z*) return 1 ;;
    *" $began") return 0 ;;
    *) return 1 ;;
  esac
}

# turn SECONDS: one command at a time may start or end this role.
turn() {
  exec 9>lock
  flock -w "$1" 9 || {
    say busy
    exit 1
  }
}

look() { # FOLDER
  cd "$1" 2>/dev/null || {
    say absent
    return 0
  }
  if lives; then say lives "$pid"; else say gone; fi
}

# Variables come from standard input, a line each: arguments of a command can be read by everybody on the machine.
start() { # FOLDER WORKING_FOLDER PATIENCE_S RUN COMMAND...
  folder=$1 work=$2 patience=$3 run=$4
  shift 4
  while IFS= read -r variable; do export "$variable"; done
  for tool in setsid flock; do
    command -v "$tool" >/dev/null || {
      say lacks "$tool"
      exit 1
    }
  done
  cd "$folder" 2>/dev/null && [ -d "$work" ] || {
    say absent
    exit 1
  }
  command -v "$1" >/dev/null || {
    say no-program "$1"
    exit 1
  }
  turn 0
  if lives; then
    say already "$pid" "$(cat run 2>/dev/null)"
    exit 1
  fi
  rm -f pid ready
  printf '%s\n' "$run" >run
  touch log
  before=$(wc -c <log)
  say starting
  # The shell writes down its own number and becomes the program, so the number is right whatever happens to us.
  setsid sh -c '
    trap "" HUP
    printf "%s %s %s\n" $$ "$(sed "s/.*) //" /proc/$$/stat | cut -d " " -f 20)" \
      "$(cat /proc/sys/kernel/random/boot_id)" >pid.new && mv pid.new pid && cd "$1" && shift && exec "$@"
  ' sh "$work" "$@" >>log 2>&1 </dev/null 9>&- &
  left=$((patience * 10))
  while [ ! -s ready ] && { [ ! -e pid ] || lives; } && [ "$left" -gt 0 ]; do
    sleep 0.1
    left=$((left - 1))
  done
  if ! lives; then
    wait $!
    code=$?
    tail -c "+$((before + 1))" log | tail -n 5 | sed 's/^/@tf-hips log /'
    # A short job may be over by now, and has then said that it was ready.
    if [ -s ready ]; then say over "$code"; else say ended "$code"; fi
    return "$code"
  elif [ -s ready ]; then
    say up "$pid" "$(cat ready)"
  else
    say slow "$pid"
    return 1
  fi
}

stop() { # FOLDER GRACE_S
  cd "$1" 2>/dev/null || {
    say absent
    return 0
  }
  turn 10
  if ! lives; then
    rm -f pid ready
    say gone
    return 0
  fi
  say ending "$pid"
  kill -TERM "$pid" 2>/dev/null
  left=$(($2 * 10))
  how=stopped
  while lives; do
    if [ "$left" -eq 0 ]; then
      how=killed
      kill -KILL "$pid" 2>/dev/null
    elif [ "$left" -lt -100 ]; then
      say stays "$pid"
      return 1
    fi
    sleep 0.1
    left=$((left - 1))
  done
  rm -f pid ready
  say "$how" "$pid"
}

# Takes an archive from standard input. What was there stays as it was unless the archive has come whole; then each file
# is put in place at once, so that who reads a certificate finds the old or the new one.
receive() { # FOLDER
  command -v tar >/dev/null || {
    say lacks tar
    return 1
  }
  mkdir -p "$1" && cd "$1" && incoming=$(mktemp -d incoming.XXXXXX) || {
    say unwritable
    return 1
  }
  trap 'rm -rf "$incoming"' EXIT
  tar -xzf - -C "$incoming" --no-same-owner || {
    say broken
    return 1
  }
  base=$(pwd)
  (
    cd "$incoming" &&
      find . ! -type d -exec sh -c 'for one; do
        if [ -d "$0/$one" ] && [ ! -L "$0/$one" ]; then
          echo "a folder is where ${one#./} comes as a file or link" >&2
          exit 1
        fi
      done' "$base" {} + &&
      find . -type d -exec sh -c 'cd "$0" && mkdir -p "$@"' "$base" {} + &&
      # -T: a link to a folder is replaced, not followed.
      find . ! -type d -exec sh -c 'for one; do mv -fT "$one" "$0/$one" || exit 1; done' "$base" {} +
  ) || {
    say unwritable
    return 1
  }
  say received
}

"$@"
