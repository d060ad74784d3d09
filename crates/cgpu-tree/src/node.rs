//! The layout of the tree: [`Node`]. Pure.

/// A directory or a file of the tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Node {
    /// The top.
    Root,
    /// A file at the top.
    RootFile(&'static str),
    /// The directory of the GPU with that index.
    Gpu(u32),
    GpuFile(u32, &'static str),
    /// The directory of a container, by its short id, below a GPU.
    Container(u32, String),
    /// A file of a container on a GPU.
    ContainerFile(u32, String, &'static str),
}

const READ: u16 = 0o444;
const WRITE: u16 = 0o644;

/// Files and their modes. Users other than root write nowhere, unlike in the original.
const ROOT_FILES: &[(&str, u16)] = &[
    ("version", READ),
    ("inst_ctl", 0o200),
    ("default_memsize", WRITE),
    ("upgrade", WRITE),
    ("major", READ),
];
const GPU_FILES: &[(&str, u16)] =
    &[("policy", WRITE), ("max_inst", WRITE), ("free_weight", READ), ("prio_ratio", WRITE)];
const CONTAINER_FILES: &[(&str, u16)] =
    &[("id", READ), ("memsize", WRITE), ("meminfo", READ), ("weight", WRITE), ("highprio", WRITE)];

impl Node {
    /// The mode of a file; `None` of a directory.
    pub(crate) fn mode(&self) -> Option<u16> {
        let (name, files) = match self {
            Node::Root | Node::Gpu(_) | Node::Container(..) => return None,
            Node::RootFile(name) => (name, ROOT_FILES),
            Node::GpuFile(_, name) => (name, GPU_FILES),
            Node::ContainerFile(_, _, name) => (name, CONTAINER_FILES),
        };
        files.iter().find(|(file, _)| file == name).map(|(_, mode)| *mode)
    }

    /// The node that `name` is in a directory, whether it is there or not.
    pub(crate) fn child(&self, name: &str) -> Option<Node> {
        let file = |files: &'static [(&'static str, u16)]| {
            files.iter().map(|(file, _)| *file).find(|file| *file == name)
        };
        match self {
            Node::Root => match file(ROOT_FILES) {
                Some(file) => Some(Node::RootFile(file)),
                None => {
                    name.parse().ok().filter(|gpu: &u32| gpu.to_string() == name).map(Node::Gpu)
                }
            },
            Node::Gpu(gpu) => Some(match file(GPU_FILES) {
                Some(file) => Node::GpuFile(*gpu, file),
                None => Node::Container(*gpu, name.to_owned()),
            }),
            Node::Container(gpu, id) => {
                file(CONTAINER_FILES).map(|file| Node::ContainerFile(*gpu, id.clone(), file))
            }
            Node::RootFile(_) | Node::GpuFile(..) | Node::ContainerFile(..) => None,
        }
    }

    /// What is in a directory, where these GPUs are there, and these containers are on each.
    pub(crate) fn children(
        &self,
        gpus: &[u32],
        containers: impl Fn(u32) -> Vec<String>,
    ) -> Vec<(String, Node)> {
        let named = |name: &&'static str, node: Node| ((*name).to_owned(), node);
        match self {
            Node::Root => {
                let files = ROOT_FILES.iter().map(|(name, _)| named(name, Node::RootFile(name)));
                files.chain(gpus.iter().map(|gpu| (gpu.to_string(), Node::Gpu(*gpu)))).collect()
            }
            Node::Gpu(gpu) => {
                let files =
                    GPU_FILES.iter().map(|(name, _)| named(name, Node::GpuFile(*gpu, name)));
                let containers = containers(*gpu).into_iter();
                files.chain(containers.map(|id| (id.clone(), Node::Container(*gpu, id)))).collect()
            }
            Node::Container(gpu, id) => {
                let file = |name| Node::ContainerFile(*gpu, id.clone(), name);
                CONTAINER_FILES.iter().map(|(name, _)| named(name, file(name))).collect()
            }
            Node::RootFile(_) | Node::GpuFile(..) | Node::ContainerFile(..) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_the_originals() {
        let children = |node: &Node| {
            let all = node.children(&[0, 3], |gpu| vec![format!("c{gpu}")]);
            all.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        let root = ["version", "inst_ctl", "default_memsize", "upgrade", "major", "0", "3"];
        assert_eq!(children(&Node::Root), root);
        let gpu = ["policy", "max_inst", "free_weight", "prio_ratio", "c3"];
        assert_eq!(children(&Node::Gpu(3)), gpu);
        let container = ["id", "memsize", "meminfo", "weight", "highprio"];
        assert_eq!(children(&Node::Container(3, "c3".into())), container);
        assert!(children(&Node::RootFile("version")).is_empty());
        assert_eq!(Node::GpuFile(0, "policy").mode(), Some(0o644));
        assert_eq!(Node::GpuFile(0, "free_weight").mode(), Some(0o444));
        assert_eq!(Node::Root.mode(), None);
    }

    #[test]
    fn directory_names_resolve_to_the_listed_nodes() {
        for node in [Node::Root, Node::Gpu(3), Node::Container(3, "c3".into())] {
            for (name, child) in node.children(&[0, 3], |gpu| vec![format!("c{gpu}")]) {
                assert_eq!(node.child(&name), Some(child), "{name}");
            }
        }
        for name in ["x", "", "03", "+3", "-1", "99999999999"] {
            assert_eq!(Node::Root.child(name), None, "{name:?}");
        }
        assert_eq!(Node::Container(0, "c".into()).child("x"), None);
        assert_eq!(Node::RootFile("version").child("x"), None);
    }
}
