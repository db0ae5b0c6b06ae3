"""Render the job of EC2: the request for the instances, and the script that each of them runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from boltcutter.launch.job import Job, assignments, seconds

HOME = "/opt/boltcutter"  # on the instances
VENV = f"{HOME}/venv/bin/python"
MAX_WAIT = 60  # minutes for which an instance waits for the others
MAX_USER_DATA = 16384  # bytes, https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-add-user-data.html
PRIVATE = re.compile(r"""["']([\w.-]+(?:\[[\w,. -]*\])? *@ *(?:git\+)?(?:file|ssh):[^"']*)["']""")  # of requirements

JOB = """\
#!/bin/bash
# %(count)s in EC2, which terminate when the run has ended, at the latest after launch.time=%(time)s.
# Without launch.py: copy %(files)s to
# %(url)s/ and run this script, with the AWS CLI.%(group)s
set -euo pipefail

IFS= read -r -d '' request <<'REQUEST' || true
%(request)s
REQUEST

IFS= read -r -d '' user_data <<'USER_DATA' || true
%(user_data)s
USER_DATA

aws ec2 run-instances%(region)s --cli-input-json "$request" --user-data "$user_data"
"""
GROUP = """
# It uses the default security group of the network, which must let the instances reach one another."""

# cloud-init runs this at the first boot. systemd then runs the job at each boot, and stops it before the network.
USER_DATA = """\
#!/bin/bash
shutdown -h +%(minutes)d # at the latest, even if the job cannot start
if ! mkdir -p %(home)s || ! cd %(home)s; then
    shutdown -h now
fi

cat >setup.sh <<'SETUP'
set -euxo pipefail
%(setup)s
SETUP

cat >run.sh <<'RUN'
%(run)s
RUN

cat >/etc/systemd/system/boltcutter.service <<'UNIT'
[Unit]
Description=Training of %(name)s
Wants=network-online.target
After=network-online.target docker.service

[Service]
ExecStart=/bin/bash %(home)s/run.sh
StandardOutput=append:/var/log/boltcutter.log
StandardError=append:/var/log/boltcutter.log
# The first process passes SIGTERM on, and training saves.
KillMode=mixed
TimeoutStopSec=300

[Install]
WantedBy=multi-user.target
UNIT

if ! systemctl daemon-reload || ! systemctl enable --now --no-block boltcutter.service; then
    shutdown -h now
fi"""

RUN = r"""cd %(home)s || exit
%(variables)s
report() { echo "$(date -u '+%%F %%T') ec2: $*"; }
metadata() { # PATH: by IMDSv2
    local token server=http://169.254.169.254/latest
    token=$(curl -sf -m 10 --noproxy '*' -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $server/api/token) &&
        curl -sf -m 10 --noproxy '*' -H "X-aws-ec2-metadata-token: $token" "$server/meta-data/$1"
}
upload() { aws s3 cp --only-show-errors /var/log/boltcutter.log "$url/logs/ec2-$instance.log"; }
leave() { aws s3 rm --only-show-errors "$url/nodes/$job/$address"; } # the others then wait for this instance
is_over() { [ "$(date +%%s)" -ge "$(cat deadline)" ]; }
finish() { # terminate the instance, unless EC2 stops it and will start it again
    trap '' TERM
    if [ -n "$stopping" ] && ! is_over; then
        report "stopped; the run continues if the instance starts again"
        leave
        upload
        exit
    fi
    report "$result; terminate"
    echo "$result" | aws s3 cp --only-show-errors - "$url/nodes/$job/ended"
%(cancel)s    upload
    tail -n 20 /var/log/boltcutter.log >/dev/console
    shutdown -h now
}
watch() { # PID: upload the log, and let the training save when EC2 announces an interruption
    local seconds=0
    while sleep 5; do
%(notice)s        (((seconds += 5) %% 60)) || upload
    done
}
stopping='' training='' result="launch.time=%(time)s reached"
trap 'stopping=yes; [ -z "$training" ] || kill -TERM "$training"' TERM
trap finish EXIT

instance=$(metadata instance-id) address=$(metadata local-ipv4)
AWS_DEFAULT_REGION=$(metadata placement/region)
export AWS_DEFAULT_REGION
# At the latest then the instance terminates, whatever happens here.
[ -e deadline ] || echo $(($(date +%%s) + %(seconds)d)) >deadline
is_over && exit
shutdown -h "+$((($(cat deadline) - $(date +%%s) + 59) / 60))"
if [ ! -e ready ]; then
    report "set up $instance"
    bash setup.sh &
    training=$!
    if ! wait "$training"; then
        result="set-up failed"
        exit
    fi
    touch ready
fi
for ((restart = 0; restart <= %(restarts)d; restart++)); do
    report "start $restart on $instance, $address"
    %(command)s &
    training=$!
    [ -z "$stopping" ] || kill -TERM "$training" # the signal came before
    watch "$training" &
    watcher=$!
    while
        wait "$training"
        status=$?
        [ "$status" -gt 128 ] && kill -0 "$training" 2>/dev/null # a signal has interrupted the wait
    do :; done
    kill "$watcher"
    training=''
    result="ended with status $status"
    case $status in
    0) result=completed && exit ;;
    2) exit ;; # a mistake that a restart does not correct
    esac
    [ -z "$stopping" ] || exit
%(interrupted)s    report "$result"
done
result="$result, launch.max_restarts=%(restarts)d reached" """

NOTICE = r"""        if [ ! -s "$notice" ] && metadata spot/instance-action >"$notice"; then
            report "EC2 announces an interruption: $(cat "$notice")"
            kill -TERM "$1"
        fi
"""
INTERRUPTED = r"""    if [ -s "$notice" ]; then
        leave
        report "$result; wait until EC2 stops this instance"
        upload
        end=$((SECONDS + 600))
        until [ -n "$stopping" ] || [ $SECONDS -ge $end ]; do sleep 2; done
        [ -z "$stopping" ] || exit
        rm -f "$notice"
    fi
"""
CANCEL = r"""    request=$(aws ec2 describe-spot-instance-requests --filters "Name=instance-id,Values=$instance" \
        --query 'SpotInstanceRequests[0].SpotInstanceRequestId' --output text)
    if ! aws ec2 cancel-spot-instance-requests --spot-instance-request-ids "$request" >/dev/null; then
        report "the spot request was not cancelled, so EC2 may start another instance"
    fi
"""
INSTALL = r"""aws s3 cp --only-show-errors %(url)s/job.tar.gz job.tar.gz
rm -rf bundle venv && mkdir bundle && tar -xzf job.tar.gz -C bundle
%(python)s -m venv venv || { # Debian and Ubuntu have it in another package
    apt-get -qq update && apt-get -qq install -y python3-venv
    %(python)s -m venv --clear venv
}
pins=()
[ ! -e bundle/code/constraints.txt ] || pins=(-c bundle/code/constraints.txt)
venv/bin/pip install -q --disable-pip-version-check "${pins[@]}" ./bundle/code %(packages)s
rm -rf bundle job.tar.gz"""


def render_job(request: dict[str, Any], user_data: str, *, url: str, files: str, time: str, region: str | None) -> str:
    """Render the shell script that submits the job, from which ``read_job`` gets the request."""
    count = request["MaxCount"]
    return JOB % {
        "count": f"{count} instances" if count > 1 else "An instance",
        "time": time,
        "files": files,
        "url": url,
        "group": GROUP if count > 1 and "SecurityGroupIds" not in request else "",
        "request": json.dumps(request, indent=2),
        "user_data": user_data,
        "region": f" --region {shlex.quote(region)}" if region else "",
    }


def read_job(text: str) -> dict[str, Any]:
    """Return the arguments of ``run_instances`` in a rendered job.

    Raises:
        ValueError: They are missing.
    """
    found = [re.search(rf"<<'{name}' .*?\n(.*?)\n{name}\n", text, re.DOTALL) for name in ("REQUEST", "USER_DATA")]
    if not found[0] or not found[1]:
        raise ValueError("job.sh: has no REQUEST and USER_DATA; launch the run again")
    return {**json.loads(found[0][1]), "UserData": found[1][1] + "\n"}


def check_requirements(project: Path) -> None:
    """Check that instances can install what a project requires, as far as its addresses tell.

    Raises:
        ValueError: A requirement is on this machine, or needs a key.
    """
    file = project / "pyproject.toml"
    if file.is_file() and (found := PRIVATE.search(file.read_text())):
        raise ValueError(
            f"launch.install: pyproject.toml requires {found[1]}, which instances cannot read; give an https address, "
            "set launch.image, or use an AMI that has it with launch.install=false"
        )


def render_user_data(
    job: Job,
    *,
    url: str,
    token: str,
    command: list[str],
    python: str,
    packages: list[str],
    image: str | None,
    registry: tuple[str, str] | None,
    setup: list[str],
    environment: dict[str, str],
    restarts: int,
    time: str,
    spot: bool,
) -> str:
    """Render the script of the instances.

    Args:
        job: The job.
        url: URL of the run.
        token: Identifies the job.
        command: What each instance runs.
        python: Interpreter that creates the virtual environment.
        packages: What is installed in it besides the project and its dependencies; empty: it is not created.
        image: Container image in which the command runs.
        registry: Registry of the image and its region, if that needs a login with the role of the instance.
        setup: Further lines of shell, before all else.
        environment: Environment variables.
        restarts: How often to start again.
        time: Largest lifetime of the instance.
        spot: Whether EC2 may interrupt it.
    """
    lines = list(setup)
    if image:
        if registry:
            login = f"docker login --username AWS --password-stdin {shlex.quote(registry[0])}"
            lines.append(f"aws ecr get-login-password --region {registry[1]} | {login}")
        lines.append(f"docker pull -q {shlex.quote(image)}")
    elif packages:
        lines.append(
            INSTALL % {"url": shlex.quote(url), "python": shlex.quote(python), "packages": shlex.join(packages)}
        )
    program = shlex.join(command)
    if image:
        names = ["AWS_DEFAULT_REGION", *environment]
        options = ["--rm", "--network=host", "--ipc=host", *(["--gpus=all"] if job.gpus else [])]
        options += [f"--env={name}" for name in names]
        program = f"docker run {shlex.join(options)} {shlex.quote(image)} {program}"
    program += f' --nodes {job.nodes} --job "$job" --address "$address"'
    if not spot:  # EC2 starts no instance again
        program += f" --minutes {MAX_WAIT}"
    variables = {"HOME": "/root", "PYTHONUNBUFFERED": "1", **environment}
    head = [f"url={shlex.quote(url)} job={shlex.quote(token)}", *(["notice=/run/boltcutter-notice"] if spot else [])]
    run = RUN % {
        "home": HOME,
        "variables": "\n".join([*head, *assignments(variables)]),
        "cancel": CANCEL if spot else "",
        "notice": NOTICE if spot else "",
        "interrupted": INTERRUPTED if spot else "",
        "time": time,
        "seconds": seconds(time),
        "restarts": restarts,
        "command": program,
    }
    settings = {"home": HOME, "setup": "\n".join(lines) or ":", "run": run.rstrip(), "name": job.name}
    return USER_DATA % {**settings, "minutes": -(-seconds(time) // 60)}
