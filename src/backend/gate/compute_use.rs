//! What part of each GPU's computing time containers had lately: one monitor a GPU is asked which containers had it.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

use crate::backend::Observed;
use cgpu_monitor::gate::client::ask_all;
use cgpu_monitor::gate::launch::MonitorDir;
use cgpu_monitor::gate::wire::{Answer, LastSeen, Question};

/// How long all of them may take. One that hangs delays a check no longer; the next check asks another.
const TIMEOUT: Duration = Duration::from_millis(50);

/// Takes note of what each of these containers, by short id, had lately of the GPUs, given by index and UUID.
/// A GPU that none of them uses is left out, and so is one that the monitor doesn't answer for.
pub fn note_held(
    state_dir: &Path,
    gpus: &BTreeMap<u32, String>,
    observed: &mut HashMap<String, Observed>,
) {
    let asked: Vec<_> = gpus
        .iter()
        .filter_map(|(index, uuid)| {
            // In a map's order, which is another each time.
            let short_id = users(*index, observed).next()?;
            let socket = MonitorDir::of(state_dir, short_id).control();
            Some((*index, socket, Question::LastSeen { uuid: uuid.clone() }))
        })
        .collect();
    let questions: Vec<_> =
        asked.iter().map(|(_, socket, question)| (&**socket, question)).collect();
    let answers = ask_all(&questions, TIMEOUT);
    let known = asked.iter().zip(answers).filter_map(|((index, ..), answer)| match answer? {
        Answer::LastSeen(last_seen) => Some((*index, last_seen)),
        _ => None,
    });
    let known: HashMap<u32, LastSeen> = known.collect();
    for instance in observed.values_mut().filter_map(|one| one.instances.as_mut()).flatten() {
        let last_seen = known.get(&instance.gpu_index);
        let pids = instance.processes.iter().map(|(pid, _)| pid.cast_unsigned());
        instance.compute_held = last_seen.map(|last_seen| last_seen.part_of(pids));
    }
}

/// The containers that have processes on a GPU, by short id: their monitors have the driver open.
fn users(gpu_index: u32, observed: &HashMap<String, Observed>) -> impl Iterator<Item = &str> {
    observed.iter().filter_map(move |(short_id, one)| {
        let mut instances = one.instances.iter().flatten();
        let uses = instances.any(|of| of.gpu_index == gpu_index && !of.processes.is_empty());
        uses.then_some(&**short_id)
    })
}
