//! What the dashboard shows is the same whether Prometheus retains our labels or calls them `exported_…`: scraped
//! by the real Prometheus, as the jobs of a cluster do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cgpu_host::events::Cause;
use serde_json::Value;
use tempfile::TempDir;

use crate::creations::Creates;
use crate::exposition::tests::snapshot;
use crate::exposition::{HostSample, text};
use crate::pods::PodGpu;
use crate::server::{Asked, BOUNDS, router};

/// How long a program may take to do what it does soon.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Jobs: whether they let our labels stand, and which labels they give the pod that is scraped.
const JOBS: [(&str, bool, &[&str]); 4] = [
    ("a host", false, &[]),
    ("the chart's PodMonitor", true, &["namespace", "pod", "container"]),
    ("a PodMonitor that says nothing of labels", false, &["namespace", "pod", "container"]),
    ("a job of prometheus.io/scrape", false, &["namespace", "pod"]),
];

/// A node with containers of two namespaces; the quota of one container is not enforced.
fn exposition() -> String {
    let mut snapshot = snapshot();
    let mut lost = snapshot.containers[0].clone();
    lost.name = Some("team/batch-1/job".into());
    lost.short_id = "b3f2________".into();
    lost.enforced = false;
    lost.shares[0].utilization_percent = Some(3);
    snapshot.containers.push(lost);
    let given = PodGpu {
        namespace: "team".into(),
        pod: "train-0".into(),
        container: "main".into(),
        resource: "nvidia.com/gpu".into(),
        uuid: "GPU-a".into(),
        devices: 1,
    };
    let creates = Creates { admitted: 2, refused: BTreeMap::from([(Cause::Memory, 1)]) };
    text(HostSample { snapshot, node: Some("node-1".into()), creates, given: vec![given] }).unwrap()
}

/// cgpu-metrics, for as long as the test runs.
fn served() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let found = exposition();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let asked = Asked::new(move || Ok(found.as_str().into()));
            cgpu_http::answer(listener, router(asked), BOUNDS).await.unwrap();
        });
    });
    address
}

fn soon<T>(found: impl Fn() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    while begun.elapsed() < TIMEOUT {
        if let Some(found) = found() {
            return Some(found);
        }
        thread::sleep(Duration::from_millis(50));
    }
    found()
}

/// A series that a query found: its labels, as far as they aren't the job's or moved aside, and its value.
type Series = (BTreeMap<String, String>, String);

struct Prometheus {
    child: Child,
    address: String,
    _scratch: TempDir,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(target: &str, honors: bool, labels: &[&str]) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path();
        let labels: Vec<_> =
            labels.iter().map(|label| format!("{label}: the-nodes-{label}")).collect();
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
             scrape_configs: [{{job_name: cgpu, honor_labels: {honors}, \
             static_configs: [{{targets: [{target:?}], labels: {{{}}}}}]}}]\n",
            labels.join(", ")
        );
        fs::write(directory.join("prometheus.yml"), config).unwrap();
        let log = directory.join("log");
        let mut command = Command::new("prometheus");
        command.arg("--config.file=prometheus.yml").arg("--storage.tsdb.path=data");
        command.arg("--web.listen-address=127.0.0.1:0").current_dir(directory);
        command.stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        let child =
            command.spawn().expect("this test needs the program prometheus; run `make deps`");
        let port = || {
            let text = fs::read_to_string(&log).ok()?;
            let all = text.split("address=127.0.0.1:").skip(1);
            let mut ports = all.map(|rest| rest.chars().take_while(char::is_ascii_digit).collect());
            ports.find(|port: &String| port != "0" && !port.is_empty())
        };
        let mut prometheus = Prometheus { child, address: String::new(), _scratch: scratch };
        let port = soon(port);
        let port = port.unwrap_or_else(|| panic!("{}", fs::read_to_string(&log).unwrap()));
        prometheus.address = format!("127.0.0.1:{port}");
        prometheus
    }

    fn answer(&self, expression: &str) -> io::Result<String> {
        let expression: String = expression.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        write!(stream, "GET /api/v1/query?query={expression} HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text.split_once("\r\n\r\n").unwrap_or_default().1.to_owned())
    }

    /// What an expression finds; nothing while Prometheus doesn't answer.
    fn series(&self, expression: &str) -> BTreeSet<Series> {
        let found: Value =
            serde_json::from_str(&self.answer(expression).unwrap_or_default()).unwrap_or_default();
        let all = found["data"]["result"].as_array().cloned().unwrap_or_default();
        all.iter()
            .map(|one| {
                let labels = one["metric"].as_object().unwrap().iter();
                let ours = labels.filter(|(name, _)| {
                    !["job", "instance"].contains(&name.as_str()) && !name.starts_with("exported_")
                });
                let ours =
                    ours.map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned()));
                (ours.collect(), one["value"][1].as_str().unwrap().to_owned())
            })
            .collect()
    }
}

/// The dashboard's queries of containers and pods, and that for its list of namespaces.
fn queries() -> (Vec<String>, String) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../packaging/grafana/cgpu.json");
    let dashboard: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let all = targets.map(|target| target["expr"].as_str().unwrap().replace("$host", "node"));
    let of_pods =
        all.filter(|query| query.contains("cgpu_container") || query.contains("cgpu_pod"));
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let namespaces = variables.iter().find(|variable| variable["name"] == "namespace").unwrap();
    // What Grafana asks Prometheus for, and what it takes of the answer's labels.
    let query = namespaces["query"].as_str().unwrap().strip_prefix("query_result(").unwrap();
    assert_eq!(namespaces["regex"], "/namespace=\"([^\"]+)\"/");
    (of_pods.collect(), query.strip_suffix(')').unwrap().to_owned())
}

/// The dashboard shows the same whether the exporter's labels stand or those of the scraped pod do.
#[test]
fn dashboard_is_the_same_under_every_label_setup() {
    let (queries, namespaces) = queries();
    assert!(queries.len() >= 13, "{queries:#?}");
    assert!(queries.iter().all(|query| query.contains("$namespace")), "{queries:#?}");
    let target = served();
    let mut first: BTreeMap<String, BTreeSet<Series>> = BTreeMap::new();
    // It takes each some seconds to begin.
    let all = JOBS.map(|(job, honors, labels)| (job, Prometheus::start(&target, honors, labels)));
    for (job, prometheus) in &all {
        let of = |series: &BTreeSet<Series>| -> BTreeSet<String> {
            series.iter().filter_map(|(labels, _)| labels.get("namespace").cloned()).collect()
        };
        let both = || Some(of(&prometheus.series(&namespaces))).filter(|all| all.len() > 1);
        assert_eq!(soon(both), Some(["default", "team"].map(str::to_owned).into()), "{job}");
        for query in &queries {
            for namespace in [".*", "team"] {
                let query = query.replace("$namespace", namespace);
                // A rate needs two scrapes; and all that is there has values.
                let found = soon(|| Some(prometheus.series(&query)).filter(|all| !all.is_empty()));
                if query.contains("== 0") || namespace == "team" {
                    // Of the namespace that is chosen, and of no other.
                    let found = of(found.as_ref().unwrap_or(&BTreeSet::new()));
                    assert!(found.iter().all(|name| name == "team"), "{job}: {query}: {found:?}");
                }
                let found = found.unwrap_or_else(|| panic!("{job}: {query}: nothing"));
                let before = first.entry(query.clone()).or_insert_with(|| found.clone());
                assert_eq!(&found, before, "{job}: {query}");
            }
        }
    }
}
