//! `cgpu-metrics`, scraped by the real Prometheus while containers allocate.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use crate::gated::{FIRST_MIB, Gated, MIB, RUNTIME, stop};
use crate::support::{Outcome, eventually, program, run_with_timeout, timeout};

fn command(gated: &Gated, words: &[&str]) -> Command {
    let metrics = Path::new(RUNTIME).with_file_name("cgpu-metrics");
    let mut command = gated.host.scratch.command(metrics);
    // NVML is no part of the simulated driver.
    command.arg("--config").arg(gated.host.config()).arg("--no-nvml").args(words);
    command
}

/// A program that runs until this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// cgpu-metrics, and where it listens.
fn served(gated: &Gated) -> (Running, String) {
    let mut server = command(gated, &["--listen", "127.0.0.1:0"]);
    let mut child = server.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().strip_prefix("listening at http://").unwrap().to_owned();
    (Running(child), url.strip_suffix("/metrics").unwrap().to_owned())
}

struct Prometheus {
    url: String,
    _running: Running,
}

impl Prometheus {
    /// Prometheus that scrapes `target` every second, with our alerts.
    fn start(gated: &Gated, target: &str) -> Self {
        let scratch = &gated.host.scratch;
        let rules = root().join("packaging/prometheus/cgpu.rules.yml").display().to_string();
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
             rule_files: [{rules:?}]\n\
             scrape_configs: [{{job_name: cgpu, static_configs: [{{targets: [{target:?}]}}]}}]\n",
        );
        let file = scratch.file("prometheus.yml", &config);
        let log = scratch.path().join("prometheus.log");
        let mut command = scratch.command(program("prometheus"));
        command.arg("--config.file").arg(&file).arg("--storage.tsdb.path");
        command.arg(scratch.directory("prometheus")).arg("--web.listen-address=127.0.0.1:0");
        command.stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap());
        let running = Running(command.spawn().unwrap());
        let port = || {
            let text = fs::read_to_string(&log).ok()?;
            let all = text.split("address=127.0.0.1:").skip(1);
            let mut ports = all.map(|rest| rest.chars().take_while(char::is_ascii_digit).collect());
            ports.find(|port: &String| port != "0" && !port.is_empty())
        };
        assert!(eventually(|| port().is_some()), "{}", fs::read_to_string(&log).unwrap());
        Prometheus { url: format!("http://127.0.0.1:{}", port().unwrap()), _running: running }
    }

    fn query(&self, expression: &str) -> Outcome {
        let mut command = Command::new(program("promtool"));
        command.args(["query", "instant", "--format=json", &self.url, expression]);
        run_with_timeout(&mut command, timeout())
    }

    /// The values of an expression; none while Prometheus doesn't answer.
    fn values(&self, expression: &str) -> Vec<f64> {
        let found: Value = serde_json::from_str(&self.query(expression).stdout).unwrap_or_default();
        let series = found.as_array().cloned().unwrap_or_default();
        series.iter().map(|one| one["value"][1].as_str().unwrap().parse().unwrap()).collect()
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn prometheus_scrapes_usage_and_answers_dashboard_queries() {
    let gated = Gated::new();
    let bundle = gated.sleeping("scraped", 1000);
    let holding = gated.start(&bundle, &["hold", "300MiB"]);
    gated.soon_accounts("scraped", 300);
    let computes = ["run", "start", "compute 1 as g", "kernels g 100000000 of 500", "sleep 1000"];
    let computing = gated.start(&bundle, &computes);
    let refused = gated.exec(&bundle, &["run", "start", "alloc 900MiB as a"]).fails();
    assert!(refused.stdout.contains("status=0x51"), "{refused}");
    let (_server, address) = served(&gated);
    let prometheus = Prometheus::start(&gated, &address);
    let is = |expression: &str, value: f64| {
        let soon = eventually(|| prometheus.values(expression) == [value]);
        assert!(soon, "{expression}: {}", prometheus.query(expression));
    };
    let container = "{container=\"scraped_____\"}";
    #[allow(clippy::cast_precision_loss, reason = "it is small")]
    let mib = |mib: u64| (mib * MIB) as f64;
    is(&format!("cgpu_container_memory_used_bytes{container}"), mib(300));
    is(&format!("cgpu_container_memory_quota_bytes{container}"), mib(1000));
    is("cgpu_gpu_memory_promised_bytes{gpu=\"0\"}", mib(1000));
    is("cgpu_container_enforced{backend=\"gate\"}", 1.0);
    is("cgpu_container_compute_share_ratio", 1.0);
    let held = "cgpu_container_compute_held_ratio > bool 0.5";
    is(held, 1.0);
    is("cgpu_container_allocations_refused_total", 1.0);
    is("cgpu_unseen", 0.0);
    is("cgpu_creates_admitted_total", 1.0);
    is(&format!("cgpu_container_monitor_updates_total{container}"), 0.0);
    // Every call was timed, and none took longer than all the time there was.
    let counted = "cgpu_container_driver_call_duration_seconds_count";
    is(
        &format!(
            "{counted} == bool on (container_id) sum by (container_id) \
                 (cgpu_container_driver_calls_total)"
        ),
        1.0,
    );
    is(
        "cgpu_container_driver_call_duration_seconds_bucket{le=\"+Inf\"} == bool ignoring (le) \
        cgpu_container_driver_call_duration_seconds_count",
        1.0,
    );
    let slowest = "histogram_quantile(1, cgpu_container_driver_call_duration_seconds_bucket)";
    assert!(eventually(|| prometheus.values(slowest).iter().any(|seconds| *seconds > 0.0)));
    let greedy = gated.bundle("greedy", FIRST_MIB + 1, &["true"]);
    gated.host.runtime().create(&greedy).fails();
    is("cgpu_creates_refused_total{cause=\"memory\"}", 1.0);
    // A rate needs two scrapes.
    let rate = "rate(cgpu_container_driver_calls_total[5m])";
    assert!(eventually(|| !prometheus.values(rate).is_empty()));
    let dashboard = fs::read_to_string(root().join("packaging/grafana/cgpu.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut asked = 0;
    for target in panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap()) {
        let expression = target["expr"].as_str().unwrap().replace("$host", ".*");
        let expression = expression.replace("$namespace", ".*");
        prometheus.query(&expression).ok();
        // Utilisation and pods are not reported here, and every container is enforced.
        let is_empty =
            ["utilization", "cgpu_pod", "== 0"].iter().any(|part| expression.contains(part));
        // A rate of what has just begun needs another scrape.
        let as_expected = || prometheus.values(&expression).is_empty() == is_empty;
        assert!(eventually(as_expected), "{expression}: {}", prometheus.query(&expression));
        asked += 1;
    }
    assert!(asked >= 8, "{asked} queries");
    // A monitor that is stopped enforces nothing.
    let monitor = gated.monitor("scraped_____");
    stop(monitor);
    is("cgpu_container_enforced{backend=\"gate\"}", 0.0);
    kill(monitor, Signal::SIGCONT).unwrap();
    is("cgpu_container_enforced{backend=\"gate\"}", 1.0);
    // Series end with their container.
    for mut program in [holding, computing] {
        program.kill().unwrap();
        program.wait().unwrap();
    }
    gated.host.runtime().delete(&bundle).ok();
    assert!(eventually(|| prometheus.values("cgpu_container_enforced").is_empty()));
    gated.soon_is_empty();
}

/// A monitor's update is counted, and so are the calls before it.
#[test]
fn monitor_update_is_counted_and_retains_call_counts() {
    let gated = Gated::new();
    let bundle = gated.sleeping("replaced", 1000);
    gated.exec(&bundle, &["run", "start", "alloc 100MiB as a"]).ok();
    let value = |name: &str| {
        let text = run_with_timeout(&mut command(&gated, &["--once"]), timeout()).ok().stdout;
        let line = text.lines().find(|line| line.starts_with(name)).map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next().unwrap().parse::<f64>().ok())
    };
    let (updates, calls) = (
        "cgpu_container_monitor_updates_total",
        "cgpu_container_driver_call_duration_seconds_count",
    );
    // If the monitor does not answer in time, the series is absent.
    assert!(eventually(|| value(updates) == Some(0.0)));
    let mut before = 0.0;
    assert!(eventually(|| {
        before = value(calls).unwrap_or_default();
        before > 0.0
    }));
    gated.update();
    assert!(eventually(|| value(updates) == Some(1.0)));
    let mut after = None;
    eventually(|| {
        after = value(calls);
        after.is_some()
    });
    assert!(after >= Some(before), "{after:?} calls after {before}");
    // For a monitor that doesn't answer, no series is reported whose value it would have to give.
    let monitor = gated.monitor("replaced____");
    stop(monitor);
    for name in [updates, calls, "cgpu_container_memory_used_bytes"] {
        assert_eq!(value(name), None, "{name}");
    }
    assert_eq!(value("cgpu_container_enforced"), Some(0.0));
    kill(monitor, Signal::SIGCONT).unwrap();
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn silent_connections_do_not_block_the_metrics() {
    let gated = Gated::new();
    let (_server, address) = served(&gated);
    // More than are answered at once.
    let silent: Vec<_> = (0..40).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let mut asking = TcpStream::connect(&address).unwrap();
    asking.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut answer = String::new();
    asking.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("# EOF\n"), "{answer}");
    // A line without an end is refused, and not retained.
    let mut endless = TcpStream::connect(&address).unwrap();
    let line = [b"GET /".as_slice(), &[b'x'; 1 << 20]].concat();
    // It may be closed before all is written.
    let _ = endless.write_all(&line);
    let mut answer = Vec::new();
    let _ = endless.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/1.1 200"), "{answer:?}");
    drop(silent);
}

#[test]
fn alert_rules_are_valid_and_fire_as_described() {
    let directory = root().join("packaging/prometheus");
    for words in [["check", "rules", "cgpu.rules.yml"], ["test", "rules", "cgpu.test.yml"]] {
        let mut command = Command::new(program("promtool"));
        run_with_timeout(command.args(words).current_dir(&directory), timeout()).ok();
    }
}

#[test]
fn metrics_print_once_and_unusable_address_is_reported() {
    let gated = Gated::new();
    let once = run_with_timeout(&mut command(&gated, &["--once"]), timeout()).ok().stdout;
    assert!(once.contains("cgpu_gpu_memory_total_bytes{gpu=\"0\"") && once.ends_with("# EOF\n"));
    let refused = |words: &[&str], part: &str| {
        let outcome = run_with_timeout(&mut command(&gated, words), timeout()).fails();
        assert!(outcome.stderr.contains(part), "{outcome}");
    };
    let by_cgpu = gated.host.cgpu(&["metrics", "--once", "--no-nvml"]).ok().stdout;
    assert_eq!(by_cgpu, once, "nothing has changed");
    let (_server, address) = served(&gated);
    refused(&["--listen", &address], "choose another by --listen");
    refused(&["--listen", "nonsense"], "write an address with a port");
    let file = gated.host.scratch.file("plain", "");
    refused(&["--listen", &format!("unix:{}", file.display())], "is there, and is no socket");
}
