#!/bin/bash
# An instance in EC2, which terminates when the run has ended, at the latest after launch.time=1:30:00.
# Without launch.py: copy job.tar.gz, record.json, config.yaml of this folder to
# s3://bucket/runs/digits/20260101-120000-0a1b2c3d/ and run this script, with the AWS CLI.
set -euo pipefail

IFS= read -r -d '' request <<'REQUEST' || true
{
  "ClientToken": "digits-20260101-120000-0a1b2c3d",
  "MinCount": 1,
  "MaxCount": 1,
  "ImageId": "ami-0123456789abcdef0",
  "InstanceType": "g5.12xlarge",
  "IamInstanceProfile": {
    "Arn": "arn:aws:iam::123456789012:instance-profile/train"
  },
  "KeyName": "mine",
  "SubnetId": "subnet-0123456789abcdef0",
  "SecurityGroupIds": [
    "sg-0123456789abcdef0"
  ],
  "MetadataOptions": {
    "HttpEndpoint": "enabled",
    "HttpTokens": "required"
  },
  "BlockDeviceMappings": [
    {
      "DeviceName": "/dev/xvda",
      "Ebs": {
        "VolumeSize": 500,
        "VolumeType": "gp3",
        "Encrypted": true,
        "DeleteOnTermination": true
      }
    }
  ],
  "InstanceInitiatedShutdownBehavior": "terminate",
  "InstanceMarketOptions": {
    "MarketType": "spot",
    "SpotOptions": {
      "SpotInstanceType": "persistent",
      "InstanceInterruptionBehavior": "stop"
    }
  },
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
        },
        {
          "Key": "project",
          "Value": "digits"
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
        },
        {
          "Key": "project",
          "Value": "digits"
        }
      ]
    },
    {
      "ResourceType": "spot-instances-request",
      "Tags": [
        {
          "Key": "Name",
          "Value": "digits-20260101-120000-0a1b2c3d"
        },
        {
          "Key": "boltcutter-job",
          "Value": "digits-20260101-120000-0a1b2c3d"
        },
        {
          "Key": "project",
          "Value": "digits"
        }
      ]
    }
  ]
}
REQUEST

IFS= read -r -d '' user_data <<'USER_DATA' || true
#!/bin/bash
shutdown -h +90 # at the latest, even if the job cannot start
if ! mkdir -p /opt/boltcutter || ! cd /opt/boltcutter; then
    shutdown -h now
fi

cat >setup.sh <<'SETUP'
set -euo pipefail # without -x: its trace would show the values of variables in the log
dnf install -y git
aws s3 cp --only-show-errors s3://bucket/runs/digits/20260101-120000-0a1b2c3d/job.tar.gz job.tar.gz
rm -rf bundle venv && mkdir bundle && tar -xzf job.tar.gz -C bundle
python3.12 -m venv venv || { # Debian and Ubuntu have it in another package
    apt-get -qq update && apt-get -qq install -y python3-venv
    python3.12 -m venv --clear venv
}
pins=()
[ ! -e bundle/code/constraints.txt ] || pins=(-c bundle/code/constraints.txt)
venv/bin/pip install -q --disable-pip-version-check "${pins[@]}" ./bundle/code s3fs
rm -rf bundle job.tar.gz
SETUP

cat >run.sh <<'RUN'
cd /opt/boltcutter || exit
url=s3://bucket/runs/digits/20260101-120000-0a1b2c3d
notice=/run/boltcutter-notice
export HOME=/root
export PYTHONUNBUFFERED=1
export WANDB_MODE=offline
export A='it'"'"'s 1'
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
    request=$(aws ec2 describe-spot-instance-requests --filters "Name=instance-id,Values=$instance" \
        --query 'SpotInstanceRequests[0].SpotInstanceRequestId' --output text)
    if ! aws ec2 cancel-spot-instance-requests --spot-instance-request-ids "$request" >/dev/null; then
        report "the spot request was not cancelled, so EC2 may start another instance"
    fi
    upload
    tail -n 20 /var/log/boltcutter.log >/dev/console
    shutdown -h now
}
watch() { # PID: upload the log, and let the training save when EC2 announces an interruption
    local seconds=0
    while sleep 5; do
        if [ ! -s "$notice" ] && metadata spot/instance-action >"$notice"; then
            report "EC2 announces an interruption: $(cat "$notice")"
            kill -TERM "$1"
        fi
        (((seconds += 5) % 60)) || upload
    done
}
stopping='' training='' result="launch.time=1:30:00 reached"
trap 'stopping=yes; [ -z "$training" ] || kill -TERM "$training"' TERM
trap finish EXIT

instance=$(metadata instance-id)
AWS_DEFAULT_REGION=$(metadata placement/region)
export AWS_DEFAULT_REGION
# At the latest then the instance terminates, whatever happens here.
[ -e deadline ] || echo $(($(date +%s) + 5400)) >deadline
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
for ((restart = 0; restart <= 3; restart++)); do
    report "start $restart on $instance"
    /opt/boltcutter/venv/bin/python -m boltcutter.launch.node s3://bucket/runs/digits/20260101-120000-0a1b2c3d trust=true &
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
    if [ -s "$notice" ]; then
        report "$result; wait until EC2 stops this instance"
        upload
        end=$((SECONDS + 600))
        until [ -n "$stopping" ] || [ $SECONDS -ge $end ]; do sleep 2; done
        [ -z "$stopping" ] || exit
        rm -f "$notice"
    fi
    report "$result"
done
result="$result, launch.max_restarts=3 reached"
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

aws ec2 run-instances --region eu-west-1 --cli-input-json "$request" --user-data "$user_data"
