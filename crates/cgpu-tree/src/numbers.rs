//! The numbers by which the kernel knows nodes: [`NodeNumbers`]. Pure.

use std::collections::HashMap;

use crate::node::Node;

/// The root's (`FUSE_ROOT_ID` of `linux/fuse.h`).
const ROOT: u64 = 1;

/// The numbers of the nodes that the kernel knows. One that it has forgotten has none any more.
#[derive(Debug)]
pub(crate) struct NodeNumbers {
    known: HashMap<u64, (Node, u64)>,
    numbers: HashMap<Node, u64>,
    next: u64,
}

impl Default for NodeNumbers {
    fn default() -> Self {
        let (known, numbers) = (HashMap::from([(ROOT, (Node::Root, 1))]), [(Node::Root, ROOT)]);
        NodeNumbers { known, numbers: HashMap::from(numbers), next: ROOT + 1 }
    }
}

impl NodeNumbers {
    /// The node of that number.
    pub(crate) fn node(&self, number: u64) -> Option<&Node> {
        self.known.get(&number).map(|(node, _)| node)
    }

    /// The node's number; `None` where the kernel doesn't know the node.
    pub(crate) fn number(&self, node: &Node) -> Option<u64> {
        self.numbers.get(node).copied()
    }

    /// The node's number, which is reported to the kernel once more.
    pub(crate) fn count(&mut self, node: &Node) -> u64 {
        let number = *self.numbers.entry(node.clone()).or_insert_with(|| {
            self.next += 1;
            self.next - 1
        });
        self.known.entry(number).or_insert_with(|| (node.clone(), 0)).1 += 1;
        number
    }

    /// The kernel forgets so many of the times that it got that number.
    pub(crate) fn forget(&mut self, number: u64, times: u64) {
        let Some((node, reported)) = self.known.get_mut(&number).filter(|_| number != ROOT) else {
            return;
        };
        *reported = reported.saturating_sub(times);
        if *reported == 0 {
            self.numbers.remove(node);
            self.known.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node retains its number until the kernel has forgotten it as often as it was given the
    /// number.
    #[test]
    fn node_number_lasts_until_all_lookups_are_forgotten() {
        let mut numbers = NodeNumbers::default();
        let (gpu, container) = (Node::Gpu(0), Node::Container(0, "3f2a".into()));
        assert_eq!(numbers.number(&Node::Root), Some(1));
        let (first, other) = (numbers.count(&gpu), numbers.count(&container));
        assert!(first != other && first > 1 && other > 1);
        assert_eq!(numbers.count(&gpu), first);
        numbers.forget(first, 1);
        assert_eq!((numbers.node(first), numbers.number(&gpu)), (Some(&gpu), Some(first)));
        numbers.forget(first, 1);
        assert_eq!((numbers.node(first), numbers.number(&gpu)), (None, None));
        assert_eq!(numbers.node(other), Some(&container));
        // A number is never another node's.
        let again = numbers.count(&gpu);
        assert!(again != first && again != other);
        numbers.forget(1, 5);
        numbers.forget(99, 5);
        assert_eq!(numbers.node(1), Some(&Node::Root));
    }
}
