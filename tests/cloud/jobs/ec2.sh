#!/bin/bash
# An instance in EC2, which terminates when the run has ended, at the latest after launch.time=1-00:00:00.
# Without launch.py: copy job.tar.gz, record.json, config.yaml of this folder to
# s3://bucket/runs/digits/20260101-120000-0a1b2c3d/ and run this script, with the AWS CLI.
set -euo pipefail

IFS= read -r -d '' request <<'REQUEST' || true
{
  "ClientToken": "digits-20260101-120000-0a1b2c3d",
  "MinCount": 1,
  "MaxCount": 1,
  "ImageId": "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
  "InstanceType": "m5.xlarge",
  "IamInstanceProfile": {
    "Name": "train"
  },
  "MetadataOptions": {
    "HttpEndpoint": "enabled",
    "HttpTokens": "required"
  },
  "BlockDeviceMappings": [
    {
      "DeviceName": "/dev/sda1",
      "Ebs": {
        "VolumeSize": 100,
        "VolumeType": "gp3",
        "Encrypted": true,
        "DeleteOnTermination": true
      }
    }
  ],
  "InstanceInitiatedShutdownBehavior": "terminate",
  "TagSpecifications": [
    {
      "ResourceType": "instance",
      "Tags": [
        {
          "Key": "Name",
          "Value": "digits-20260101-120000-0a1b2c3d"
        },
        {
          "Key": "boltcutter-job",
          "Value": "digits-20260101-120000-0a1b2c3d"
        }
      ]
    },
    {
      "ResourceType": "volume",
      "Tags": [
        {
          "Key": "Name",
          "Value": "digits-20260101-120000-0a1b2c3d"
        },
        {
          "Key": "boltcutter-job",
          "Value": "digits-20260101-120000-0a1b2c3d"
        }
      ]
    }
  ]
}
REQUEST

IFS= read -r -d '' user_data <<'USER_DATA' || true
#!/bin/bash
shutdown -h +1440 # at the latest, even if the job cannot start
if ! mkdir -p /opt/boltcutter || ! cd /opt/boltcutter; then
    shutdown -h now
fi

cat >setup.sh <<'SETUP'
set -euo pipefail # without -x: its trace would show the values of variables in the log
# At the first boot, other programs such as unattended-upgrades hold the lock of apt.
[ ! -d /etc/apt/apt.conf.d ] || echo 'DPkg::Lock::Timeout "600";' >/etc/apt/apt.conf.d/90boltcutter
aws s3 cp --only-show-errors s3://bucket/runs/digits/20260101-120000-0a1b2c3d/job.tar.gz job.tar.gz
rm -rf bundle venv && mkdir bundle && tar -xzf job.tar.gz -C bundle
python3 -m venv venv || { # Debian and Ubuntu have it in another package
    apt-get -qq update && apt-get -qq install -y python3-venv
    python3 -m venv --clear venv
}
pins=()
[ ! -e bundle/code/constraints.txt ] || pins=(-c bundle/code/constraints.txt)
venv/bin/pip install -q --disable-pip-version-check "${pins[@]}" ./bundle/code s3fs
rm -rf bundle job.tar.gz
SETUP

cat >run.sh <<'RUN'
cd /opt/boltcutter || exit
url=s3://bucket/runs/digits/20260101-120000-0a1b2c3d
export HOME=/root
export PYTHONUNBUFFERED=1
report() { echo "$(date -u '+%F %T') ec2: $*"; }
metadata() { # PATH: by IMDSv2
    local token server=http://169.254.169.254/latest
    token=$(curl -sf -m 10 --noproxy '*' -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $server/api/token) &&
        curl -sf -m 10 --noproxy '*' -H "X-aws-ec2-metadata-token: $token" "$server/meta-data/$1"
}
upload() { aws s3 cp --only-show-errors /var/log/boltcutter.log "$url/logs/ec2-$instance.log"; }
is_over() { [ "$(date +%s)" -ge "$(cat deadline)" ]; }
finish() { # terminate the instance, unless EC2 stops it and will start it again
    trap '' TERM
    if [ -n "$stopping" ] && ! is_over; then
        report "stopped; the run continues if the instance starts again"
        upload
        exit
    fi
    report "$result; terminate"
    upload
    tail -n 20 /var/log/boltcutter.log >/dev/console
    shutdown -h now
}
watch() { # PID: upload the log, and let the training save when EC2 announces an interruption
    local seconds=0
    while sleep 5; do
        (((seconds += 5) % 60)) || upload
    done
}
stopping='' training='' result="launch.time=1-00:00:00 reached"
trap 'stopping=yes; [ -z "$training" ] || kill -TERM "$training"' TERM
trap finish EXIT

instance=$(metadata instance-id)
AWS_DEFAULT_REGION=$(metadata placement/region)
export AWS_DEFAULT_REGION
# At the latest then the instance terminates, whatever happens here.
[ -e deadline ] || echo $(($(date +%s) + 86400)) >deadline
is_over && exit
shutdown -h "+$((($(cat deadline) - $(date +%s) + 59) / 60))"
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
for ((restart = 0; restart <= 10; restart++)); do
    report "start $restart on $instance"
    /opt/boltcutter/venv/bin/python -m boltcutter_launch.node s3://bucket/runs/digits/20260101-120000-0a1b2c3d trust=true &
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
    report "$result"
done
result="$result, launch.max_restarts=10 reached"
RUN

cat >/etc/systemd/system/boltcutter.service <<'UNIT'
[Unit]
Description=Training of digits
Wants=network-online.target
After=network-online.target docker.service

[Service]
ExecStart=/bin/bash /opt/boltcutter/run.sh
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
fi
USER_DATA

aws ec2 run-instances --cli-input-json "$request" --user-data "$user_data"
