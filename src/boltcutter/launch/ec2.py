"""Launch runs on instances of Amazon EC2, which terminate when the run has ended."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from boltcutter.checkpoint.storage import resolve_filesystem, store_errors
from boltcutter.launch import aws
from boltcutter.launch import jupyter as notebook
from boltcutter.launch.bundle import BUNDLE, RECORD
from boltcutter.launch.cloud import CloudLauncher, job_name, read
from boltcutter.launch.ec2_script import MAX_USER_DATA, VENV, check_requirements, read_job, render_job, render_user_data
from boltcutter.launch.job import Job, State, Status, UnclearSubmissionError, check_control_characters
from boltcutter.launch.machines import EC2, check_devices
from boltcutter.run import folder as run

TAG = "boltcutter-job"  # of all that belongs to a job
FORMS = {
    "ami": (r"ami-[0-9a-f]{8}([0-9a-f]{9})?|/[\w./-]+", "the ID of an AMI or a parameter of SSM, such as {}"),
    "instance_type": (r"[a-z0-9-]+\.[a-z0-9-]+", "an instance type; try one such as g5.xlarge"),
    "subnet": (r"subnet-[0-9a-f]{8}([0-9a-f]{9})?", "the ID of a subnet; try one such as subnet-0123456789abcdef0"),
    "security_group": (r"sg-[0-9a-f]{8}([0-9a-f]{9})?", "the ID of a group; try one such as sg-0123456789abcdef0"),
    "instance_profile": (
        r"[\w+=,.@-]+|arn:aws[a-z-]*:iam::\d{12}:instance-profile/\S+",
        "the name or ARN of an instance profile; correct it",
    ),
}
# With the NVIDIA driver, Docker, Python 3.12 and the AWS CLI: https://docs.aws.amazon.com/dlami/latest/devguide
AMI = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
ALIVE = ("pending", "running", "stopping", "stopped")


class EC2Launcher(CloudLauncher):
    """Run on instances that set themselves up, find one another through the storage, and terminate at the end.

    Args:
        storage: Parent URL of the runs, such as s3://bucket/runs.
        instance_type: Type of each instance, such as g5.xlarge.
        instance_profile: Name or ARN of the instance profile with whose role instances use the storage.
        region: Region; null: that of the environment or of the AWS profile.
        ami: ID of the image of the machine, or a parameter of SSM that has it.
        spot: Whether to use Spot Instances. EC2 stops interrupted ones, and starts them again when it has capacity.
        max_hours: Lifetime after which each instance terminates, whatever happens.
        key_name: Key pair for SSH.
        subnet: Subnet; null: one of the default network.
        security_group: Security group, which must let instances reach one another; null: one of the job's own.
        volume_gb: Size of the root volume.
        root_device: Name of the root device of the AMI.
        tags: Tags of instances, volumes and requests.
        image: Container image with Python, the library and the project's dependencies; null: none is used.
        install: Whether to create a virtual environment with the project's dependencies; not with an image.
        python: Python interpreter that creates the environment, or runs the training if there is none.
        setup: Lines of shell that root runs at the first boot, before all else.
        environment: Environment variables of the run.
        max_restarts: How often each node starts again after a failure or an interruption.
        max_code_mb: Limit of the size of the project's files, which are sent with each job.
        jupyter: Whether to start JupyterLab with the project instead of training.
        idle_minutes: Minutes without activity after which JupyterLab ends, and the instance terminates.
    """

    platform, job_file, protocols = "ec2", "job.sh", ("s3",)

    def __init__(
        self,
        *,
        storage: str | None = None,
        instance_type: str | None = None,
        instance_profile: str | None = None,
        region: str | None = None,
        ami: str = AMI,
        spot: bool = False,
        max_hours: float = 24,
        key_name: str | None = None,
        subnet: str | None = None,
        security_group: str | None = None,
        volume_gb: int = 100,
        root_device: str = "/dev/sda1",
        tags: dict[str, str] | None = None,
        image: str | None = None,
        install: bool = True,
        python: str | None = None,
        setup: list[str] | None = None,
        environment: dict[str, str] | None = None,
        max_restarts: int = 10,
        max_code_mb: float = 50,
        jupyter: bool = False,
        idle_minutes: float = 60,
    ) -> None:
        self.install = install and not image
        super().__init__(
            storage=storage,
            image=image,
            python=python or ("python" if image else "python3"),
            environment=environment,
            max_restarts=max_restarts,
            max_code_mb=max_code_mb,
        )
        self.instance_type, self.instance_profile, self.region = instance_type, instance_profile, region
        self.ami, self.spot, self.max_hours, self.key_name = ami, spot, max_hours, key_name
        self.subnet, self.security_group, self.volume_gb = subnet, security_group, volume_gb
        self.root_device, self.tags, self.setup = root_device, tags or {}, setup or []
        self.jupyter, self.idle_minutes = jupyter, idle_minutes
        aws.check_region(region)
        for name, value in vars(self).items():
            lines = [line.replace("\n", "") for line in value] if name == "setup" else value
            check_control_characters(f"launch.{name}", lines)
        for name, (form, what) in FORMS.items():
            if (value := getattr(self, name)) is not None and not re.fullmatch(form, value):
                raise ValueError(f"launch.{name}={value} is not {what.format(AMI)}")
        for name, least in (("max_hours", 0.1), ("volume_gb", 8)):
            if getattr(self, name) < least:
                raise ValueError(f"launch.{name}={getattr(self, name)} is less than {least}; try launch.{name}={least}")
        if TAG in self.tags:
            raise ValueError(f"launch.tags.{TAG}: identifies the job; remove it")

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that cannot run, as far as can be known before submission."""
        super().check(job)
        if not str(self.storage).startswith("s3://"):
            raise ValueError(f"launch.storage={self.storage}: instances share no path; use s3://<bucket>/runs")
        if not self.instance_type:
            example = "g5.xlarge" if job.gpus else "m7i.xlarge"
            raise ValueError(f"launch.instance_type: not set; try launch.instance_type={example}")
        if not self.instance_profile:
            raise ValueError(
                "launch.instance_profile: not set, so that instances cannot use the storage; docs/cloud.md shows how "
                "to create one"
            )
        if self.jupyter:
            notebook.check_job(job, self.idle_minutes)
        if self.install and job.root:
            check_requirements(job.root)
        check_devices("launch.instance_type", self.instance_type, EC2, job)
        if (size := len(self._user_data(job).encode())) > MAX_USER_DATA:
            raise ValueError(
                f"launch.setup: the script of the instances has {size} bytes, and EC2 accepts {MAX_USER_DATA}; move "
                "lines to a script of the project, or use launch.image"
            )

    def command(self, job: Job) -> list[str]:
        """Return the command that each node runs."""
        options = notebook.arguments(self.idle_minutes) if self.jupyter else []
        return [VENV if self.install else self.python, *super().command(job)[1:], *options]

    def render(self, job: Job) -> str:
        """Render a shell script with the request for the instances and the script that they run."""
        names = ", ".join((BUNDLE, *RECORD[:2]))
        return render_job(
            self._request(job),
            self._user_data(job),
            url=self.remote_folder(job.folder),
            files=f"{names} of this folder",
            hours=self.max_hours,
            region=self.region,
        )

    def _request(self, job: Job) -> dict[str, Any]:
        """Return arguments of RunInstances: all instances or none.

        Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html.
        """
        token = _token(job)
        tags = [{"Key": "Name", "Value": token}, {"Key": TAG, "Value": token}]
        tags += [{"Key": str(key), "Value": str(value)} for key, value in self.tags.items()]
        tagged = ["instance", "volume", *(["spot-instances-request"] if self.spot else [])]
        disk = {"VolumeSize": self.volume_gb, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
        profile = str(self.instance_profile)
        # The token makes EC2 answer a repeated request with the instances of the first one.
        request: dict[str, Any] = {"ClientToken": token, "MinCount": job.nodes, "MaxCount": job.nodes}
        request |= {"ImageId": f"resolve:ssm:{self.ami}" if self.ami.startswith("/") else self.ami}
        request |= {"InstanceType": self.instance_type}
        request |= {"IamInstanceProfile": {"Arn" if profile.startswith("arn:") else "Name": profile}}
        request |= {"KeyName": self.key_name} if self.key_name else {}
        request |= {"SubnetId": self.subnet} if self.subnet else {}
        request |= {"SecurityGroupIds": [self.security_group]} if self.security_group else {}
        request |= {"MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required"}}  # IMDSv2 only
        request |= {"BlockDeviceMappings": [{"DeviceName": self.root_device, "Ebs": disk}]}
        request |= {"InstanceInitiatedShutdownBehavior": "terminate"}
        if self.spot:  # a stopped instance keeps its address and its disk
            options = {"SpotInstanceType": "persistent", "InstanceInterruptionBehavior": "stop"}
            request |= {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": options}}
        return request | {"TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in tagged]}

    def _user_data(self, job: Job) -> str:
        region = aws.image_region(self.image or "")
        return render_user_data(
            job,
            url=self.remote_folder(job.folder),
            token=_token(job),
            command=self.command(job),
            python=self.python,
            packages=["s3fs", *(["jupyterlab", "ipykernel"] if self.jupyter else [])] if self.install else [],
            image=self.image,
            registry=(str(self.image).partition("/")[0], region) if region else None,
            setup=self.setup,
            environment=self.variables(job),
            restarts=self.max_restarts,
            hours=self.max_hours,
            spot=self.spot,
        )

    def check_credentials(self) -> None:
        """Raise ValueError with the command to log in, if there are no valid credentials."""
        aws.check_credentials(self.region)

    def create(self, job: Job, file: Path) -> str:
        """Create the security group and the instances, or neither; returns the region and the tag of the job."""
        request = read_job(file.read_text())
        ec2 = aws.client("ec2", self.region)
        job_id = f"{ec2.meta.region_name}/{request['ClientToken']}"
        if request["ImageId"].startswith("resolve:ssm:"):
            request["ImageId"] = self._resolve(request["ImageId"].removeprefix("resolve:ssm:"))
        self._check_root_device(ec2, request)
        if self.spot:  # from then on EC2 starts no further instance
            limit = datetime.now(timezone.utc) + timedelta(hours=self.max_hours)
            request["InstanceMarketOptions"]["SpotOptions"]["ValidUntil"] = limit.replace(microsecond=0)
        if own := "SecurityGroupIds" not in request:
            request["SecurityGroupIds"] = [self._create_group(ec2, request)]
        try:
            with aws.as_value_errors():
                made = ec2.run_instances(**request)["Instances"]
        except ValueError as error:
            code = aws.error_code(error)
            if not code or code.startswith(("Internal", "Service", "503")):
                raise UnclearSubmissionError(
                    f"{error}; EC2 may have started instances: look for those with the tag {TAG}="
                    f"{request['ClientToken']}, and terminate them"
                ) from None
            if own:
                _delete_group(ec2, request["ClientToken"])
            if "iamInstanceProfile" in str(error):
                name = f"launch.instance_profile={self.instance_profile}"
                raise ValueError(f"{name}: the account has no such instance profile; create it") from None
            raise
        if self.jupyter:
            print(notebook.tunnel("ec2", made[0]["InstanceId"], region=ec2.meta.region_name))
        return job_id

    def _resolve(self, parameter: str) -> str:
        """Return the AMI of a parameter of SSM."""
        try:
            with aws.as_value_errors():
                found = aws.client("ssm", self.region).get_parameter(Name=parameter)
        except ValueError as error:
            if aws.error_code(error) != "ParameterNotFound":
                raise
            raise ValueError(f"launch.ami={parameter}: the region has no such parameter; correct it") from None
        return str(found["Parameter"]["Value"])

    def _check_root_device(self, ec2: Any, request: dict[str, Any]) -> None:
        with aws.as_value_errors():
            found = ec2.describe_images(ImageIds=[request["ImageId"]])["Images"]
        device = found[0].get("RootDeviceName") if found else None
        if device and device != self.root_device:
            raise ValueError(
                f"launch.root_device={self.root_device}: that of {request['ImageId']} is {device}; "
                f"try launch.root_device={device}"
            )

    def _create_group(self, ec2: Any, request: dict[str, Any]) -> str:
        """Create a security group whose members reach one another, and whom nobody else reaches."""
        token, tags = request["ClientToken"], request["TagSpecifications"][0]["Tags"]
        with aws.as_value_errors():
            known = ec2.describe_security_groups(Filters=_filters(token))["SecurityGroups"]
            if known:  # of an earlier attempt to submit this job
                return str(known[0]["GroupId"])
            made = ec2.create_security_group(
                GroupName=token,
                Description="Instances of one job of boltcutter",
                VpcId=self._network(ec2),
                TagSpecifications=[{"ResourceType": "security-group", "Tags": tags}],
            )
        group = str(made["GroupId"])
        rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
        try:
            with aws.as_value_errors():
                ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
        except ValueError:
            _delete_group(ec2, token)
            raise
        return group

    def _network(self, ec2: Any) -> str:
        """Return the network of the subnet, or the default one."""
        if self.subnet:
            return str(ec2.describe_subnets(SubnetIds=[self.subnet])["Subnets"][0]["VpcId"])
        networks = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
        if not networks:
            raise ValueError("launch.subnet: not set, and the account has no default network; give a subnet")
        return str(networks[0]["VpcId"])

    def status(self, job_id: str) -> Status:
        """Return the status of the instances; deletes the security group when all have terminated."""
        region, token = _split(job_id)
        ec2 = aws.client("ec2", region)
        with aws.as_value_errors():
            found, requests = _instances(ec2, token), _spot_requests(ec2, token)
        states = [instance["State"]["Name"] for instance in found]
        alive = [state for state in states if state in ALIVE]
        waiting = [request for request in requests if request["State"] == "open"]
        counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no instances"
        text = f"job {token}, {counted}"
        if "stopped" in alive or waiting:
            return Status("pending", f"{text}, waits for Spot capacity" if self.spot else text)
        state: State = "pending" if "pending" in alive else "running" if alive else "ended"
        if state == "ended" and "shutting-down" not in states:
            _delete_group(ec2, token)
        if self.jupyter and state == "running":
            instance = next(one["InstanceId"] for one in found if one["State"]["Name"] in ALIVE)
            text += "\n" + notebook.tunnel("ec2", instance, region=region)
        return Status(state, text)

    def cancel(self, job_id: str) -> None:
        """Cancel Spot requests and terminate the instances, whose training saves while they shut down."""
        region, token = _split(job_id)
        ec2 = aws.client("ec2", region)
        with aws.as_value_errors():
            requests = [request["SpotInstanceRequestId"] for request in _spot_requests(ec2, token)]
            if requests:  # before the instances, which EC2 would replace
                ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=requests)
            found = [one["InstanceId"] for one in _instances(ec2, token) if one["State"]["Name"] in ALIVE]
            if found:
                ec2.terminate_instances(InstanceIds=found)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of rank 0; without any, the logs of the instances, or their consoles."""
        has_output = False
        for text in super().logs(job_id, folder, follow=follow):
            has_output = True
            yield text
        if has_output:
            return
        place = f"{self.remote_folder(folder)}/logs"
        with store_errors(place):
            store, path = resolve_filesystem(place)
            names = [name.rpartition("/")[2] for name in store.glob(f"{path}/ec2-*.log")]
        for name in sorted(names):
            yield read(f"{place}/{name}").decode(errors="replace")
        if names:
            return
        region, token = _split(job_id)
        ec2 = aws.client("ec2", region)
        with aws.as_value_errors():
            for one in _instances(ec2, token):
                yield str(ec2.get_console_output(InstanceId=one["InstanceId"]).get("Output") or "")


def _token(job: Job) -> str:
    """Return what identifies the job: unique to the run, and to each launch of it."""
    name = job_name(job, limit=50)
    is_new = not (job.folder / RECORD[0]).is_file()
    earlier = None if is_new else (run.read_record(job.folder).get("launch") or {}).get("id")
    return f"{name}-{zlib.crc32(str(earlier).encode()):08x}" if earlier else name


def _split(job_id: str) -> tuple[str, str]:
    """Split a recorded ID into the region and the tag.

    Raises:
        ValueError: It is malformed.
    """
    region, _, token = job_id.partition("/")
    if not re.fullmatch(aws.REGION, region) or not re.fullmatch(r"[a-z0-9-]+", token):
        raise ValueError(f"record.json has the job id {job_id}: expected <region>/<tag of the job>; correct it")
    return region, token


def _filters(token: str) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{TAG}", "Values": [token]}]


def _instances(ec2: Any, token: str) -> list[dict[str, Any]]:
    pages = ec2.get_paginator("describe_instances").paginate(Filters=_filters(token))
    return [one for page in pages for group in page["Reservations"] for one in group["Instances"]]


def _spot_requests(ec2: Any, token: str) -> list[dict[str, Any]]:
    """Return the requests that can still start an instance."""
    found = ec2.describe_spot_instance_requests(Filters=_filters(token))["SpotInstanceRequests"]
    return [request for request in found if request["State"] in ("open", "active", "disabled")]


def _delete_group(ec2: Any, token: str) -> None:
    """Delete the security group of the job, if it has one that is no longer in use."""
    try:
        with aws.as_value_errors():
            for group in ec2.describe_security_groups(Filters=_filters(token))["SecurityGroups"]:
                ec2.delete_security_group(GroupId=group["GroupId"])
    except ValueError as error:
        if aws.error_code(error) not in ("DependencyViolation", "InvalidGroup.NotFound"):
            raise
