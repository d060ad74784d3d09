//! `cri --socket PATH VERB`: one call to a container runtime over its CRI socket.
//!
//! The request is JSON on standard input, the response JSON on standard output, both with the field
//! names of `runtime.v1` (`{}` where a message is empty). A refusal is the runtime's own message on
//! standard error and exit status 1.
//!
//! It is a program of its own so that neither the tests nor a build of cgpu needs a gRPC
//! stack. It must know nothing of any test.

mod call;
mod messages;
#[path = "../../support/patience.rs"]
mod patience;

use std::process::ExitCode;

use anyhow::{Context, bail};

use messages as m;

/// The verbs, for the message about an unknown one.
const VERBS: &str = "version, run-pod, stop-pod, remove-pod, create, start, stop, remove, status, \
                     update, exec-sync";

fn main() -> ExitCode {
    match run(std::env::args().skip(1).collect()) {
        Ok(response) => {
            println!("{response}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cri: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Vec<String>) -> anyhow::Result<String> {
    let [flag, socket, verb] = args.as_slice() else {
        bail!("usage: cri --socket PATH VERB < REQUEST")
    };
    if flag != "--socket" {
        bail!("unknown argument {flag}; usage: cri --socket PATH VERB < REQUEST");
    }
    let request =
        std::io::read_to_string(std::io::stdin()).context("standard input can't be read")?;
    let call = call::Call { socket, request: &request };
    match verb.as_str() {
        "version" => call.unary::<m::VersionRequest, m::VersionResponse>("Version"),
        "run-pod" => {
            call.unary::<m::RunPodSandboxRequest, m::RunPodSandboxResponse>("RunPodSandbox")
        }
        "stop-pod" => call.unary::<m::PodSandboxId, m::Empty>("StopPodSandbox"),
        "remove-pod" => call.unary::<m::PodSandboxId, m::Empty>("RemovePodSandbox"),
        "create" => {
            call.unary::<m::CreateContainerRequest, m::CreateContainerResponse>("CreateContainer")
        }
        "start" => call.unary::<m::ContainerId, m::Empty>("StartContainer"),
        "stop" => call.unary::<m::StopContainerRequest, m::Empty>("StopContainer"),
        "remove" => call.unary::<m::ContainerId, m::Empty>("RemoveContainer"),
        "status" => {
            call.unary::<m::ContainerStatusRequest, m::ContainerStatusResponse>("ContainerStatus")
        }
        "update" => {
            call.unary::<m::UpdateContainerResourcesRequest, m::Empty>("UpdateContainerResources")
        }
        "exec-sync" => call.unary::<m::ExecSyncRequest, m::ExecSyncResponse>("ExecSync"),
        other => bail!("unknown verb {other}; known are {VERBS}"),
    }
}
