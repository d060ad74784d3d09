//! Where Kubernetes' grants lie: a directory of root's, with a file for each [`Grant`].
//!
//! A grant without a holder is named by its token, and one with a holder by the pod's UID and the container's name. So
//! a container that is recreated finds its own without a token, after a reboot too. Owner and mode of directory and
//! files are checked before anything is believed. Must not know what a grant means, nor to which process it is
//! reported.

mod claims;
mod directory;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cgpu_core::request::claim::ClaimError;
use cgpu_core::request::grant::{FORMAT, Grant, PodContainer, TOKEN, is_token};
use thiserror::Error;

pub use claims::{Claims, Given};
use directory::Directory;

/// Why a container isn't given what its token names.
#[derive(Debug, Error)]
pub enum GrantError {
    /// A token in a container that is no pod's, as far as its engine says.
    #[error(
        "{TOKEN} names what Kubernetes gave a pod's container, and this container is no pod's; take the variable out, or, \
         if it is a pod's, update its engine: containerd's releases from 2023 on tell the pod's UID"
    )]
    NoPod,
    /// A text that is no token.
    #[error(
        "{TOKEN}={0:?} is no grant's name; it is set by Kubernetes alone: take it out of the pod or its image"
    )]
    NoToken(String),
    /// A token without a record.
    #[error(
        "{TOKEN} names no grant of this node: what it named has ended, or was another container's; take the variable out of \
         the pod if it sets it itself, else delete the pod, so that its controller makes another"
    )]
    NoRecord,
    /// A token of another's.
    #[error("{TOKEN} names a grant that isn't {asked}'s{owner}; take the variable out of the pod")]
    Others {
        /// The container that came with it.
        asked: PodContainer,
        /// Whose it is, as the end of a clause.
        owner: String,
    },
    /// What a claim gives can't be had.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// A GPU of the device plugin's that a claim has.
    #[error(
        "GPU {uuid} is given out by claims (DRA) on this node: claim {claim} has it; a GPU is given out by claims or by the \
         device plugin, not by both"
    )]
    Claimed {
        /// The GPU.
        uuid: String,
        /// A claim that has it.
        claim: String,
    },
    /// A directory or file that others could have written.
    #[error(
        "{path} can't be trusted: {why}; what Kubernetes gave is unknown, and no container gets a GPU by it"
    )]
    Untrusted {
        /// The directory or file.
        path: PathBuf,
        why: &'static str,
    },
    /// A record of another version, or none.
    #[error(
        "{path} is no record of a grant: {why}; delete the pod, so that its controller makes another"
    )]
    Unreadable { path: PathBuf, why: String },
    /// Reading or writing failed.
    #[error("{path}: {source}")]
    Io {
        /// The directory or file.
        path: PathBuf,
        source: io::Error,
    },
}

/// The directory.
#[derive(Debug, Clone)]
pub struct Grants {
    directory: Directory,
}

impl Grants {
    /// The grants in `directory`, which may be missing: then there are none.
    #[must_use]
    pub fn at(directory: &Path) -> Self {
        Grants { directory: Directory::at(directory) }
    }

    /// The grant of a container that comes with `token`, or is `container`: the record that its token names, if it may become
    /// the holder, else the one that it holds. `None` if it has neither.
    ///
    /// # Errors
    ///
    /// If the token has no record or is another container's, or the directory can't be trusted.
    pub fn find(
        &self,
        token: Option<&str>,
        container: Option<&PodContainer>,
    ) -> Result<Option<Grant>, GrantError> {
        let token = token.filter(|token| !token.is_empty());
        let Some(container) = container else {
            return if token.is_some() { Err(GrantError::NoPod) } else { Ok(None) };
        };
        let is_there = self.directory.is_trusted()?;
        let read = |path: PathBuf| if is_there { self.read(&path) } else { Ok(None) };
        let named = token.filter(|token| is_token(token)).map(|token| read(self.path(token)));
        let named = named.transpose()?.flatten();
        // A kubelet that has forgotten what it gave gives again.
        if let Some(grant) = named.as_ref().filter(|grant| grant.may_be_of(container)) {
            return Ok(Some(grant.clone()));
        }
        let held = self.path_of(container).map(read).transpose()?.flatten();
        match (held, named, token) {
            // The name of the file is the key; what is in it is the truth.
            (Some(held), ..) if held.may_be_of(container) => Ok(Some(held)),
            (Some(other), ..) | (None, Some(other), _) => Err(others(&other, container)),
            (None, None, None) => Ok(None),
            (None, None, Some(token)) if is_token(token) => Err(GrantError::NoRecord),
            (None, None, Some(token)) => Err(GrantError::NoToken(token.chars().take(64).collect())),
        }
    }

    /// Makes `container` the holder of the grant that it comes with, if it isn't yet. From then on the token serves no
    /// other container.
    ///
    /// # Errors
    ///
    /// As [`Grants::find`], or if the record can't be written.
    pub fn take(&self, token: &str, container: &PodContainer) -> Result<(), GrantError> {
        let Some(found) = self.find(Some(token), Some(container))? else { return Ok(()) };
        if found.holder.is_some() {
            return Ok(());
        }
        let _lock = self.directory.lock()?;
        // Another may have come with the same token meanwhile.
        let Some(mut grant) = self.find(Some(token), Some(container))? else { return Ok(()) };
        if grant.holder.is_none() {
            let unheld = self.path(&grant.token);
            grant.holder = Some(container.clone());
            self.write(&grant)?;
            fs::remove_file(&unheld).map_err(|source| GrantError::Io { path: unheld, source })?;
        }
        Ok(())
    }

    /// Writes a new grant. Grants of other pods of any of its devices end: the kubelet gives none out twice.
    ///
    /// # Errors
    ///
    /// If it can't be written.
    pub fn give(&self, grant: &Grant) -> Result<(), GrantError> {
        self.directory.make()?;
        let _lock = self.directory.lock()?;
        self.require_unclaimed(grant)?;
        let pods = |grant: &Grant| -> Vec<String> {
            let all = grant.holder.iter().chain(&grant.candidates);
            all.map(|container| container.uid.clone()).collect()
        };
        let new = pods(grant);
        for other in self.all()? {
            let is_same_pod = pods(&other).iter().any(|uid| new.contains(uid));
            let shares = other.devices.iter().any(|device| grant.devices.contains(device));
            if shares && !is_same_pod && other.resource == grant.resource {
                self.remove(&other)?;
            }
        }
        self.write(grant)
    }

    /// Sees that no claim has a GPU of `grant`.
    fn require_unclaimed(&self, grant: &Grant) -> Result<(), GrantError> {
        for claim in Claims::at(self.directory.path()).all()? {
            let mut claimed = claim.shares.iter().flat_map(|share| &share.gpus);
            let is_given = |uuid: &str| grant.gpus.iter().any(|gpu| gpu.uuid == uuid);
            if let Some(gpu) = claimed.find(|gpu| is_given(&gpu.uuid)) {
                return Err(GrantError::Claimed { uuid: gpu.uuid.clone(), claim: claim.title() });
            }
        }
        Ok(())
    }

    /// Ends the grants of which `has_ended` says so.
    ///
    /// # Errors
    ///
    /// If the directory can't be read, or a record not removed.
    pub fn end(&self, has_ended: impl Fn(&Grant) -> bool) -> Result<Vec<Grant>, GrantError> {
        if !self.directory.is_trusted()? {
            return Ok(Vec::new());
        }
        let _lock = self.directory.lock()?;
        let over: Vec<Grant> = self.all()?.into_iter().filter(|grant| has_ended(grant)).collect();
        over.iter().try_for_each(|grant| self.remove(grant))?;
        Ok(over)
    }

    /// All grants. A file that is no record is left out.
    ///
    /// # Errors
    ///
    /// If the directory can't be read or trusted.
    pub fn all(&self) -> Result<Vec<Grant>, GrantError> {
        if !self.directory.is_trusted()? {
            return Ok(Vec::new());
        }
        let files = self.directory.files()?;
        Ok(files.iter().filter_map(|path| self.read(path).unwrap_or_default()).collect())
    }

    fn path(&self, token: &str) -> PathBuf {
        self.directory.path().join(format!("{token}.json"))
    }

    /// Where the record of a holder lies. `None` if its names are none of Kubernetes'.
    fn path_of(&self, container: &PodContainer) -> Option<PathBuf> {
        let PodContainer { uid, container, .. } = container;
        let is_name = |text: &str| {
            (1..=63).contains(&text.len())
                && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        let name = format!("{uid}_{container}.json");
        (is_name(uid) && is_name(container)).then(|| self.directory.path().join(name))
    }

    fn place(&self, grant: &Grant) -> Option<PathBuf> {
        match &grant.holder {
            Some(holder) => self.path_of(holder),
            None => Some(self.path(&grant.token)),
        }
    }

    fn write(&self, grant: &Grant) -> Result<(), GrantError> {
        let unnamed = || GrantError::Io {
            path: self.directory.path().to_owned(),
            source: io::Error::from(io::ErrorKind::InvalidInput),
        };
        self.directory.write(self.place(grant).ok_or_else(unnamed)?, grant)
    }

    fn remove(&self, grant: &Grant) -> Result<(), GrantError> {
        self.place(grant).map_or(Ok(()), |path| self.directory.remove(path))
    }

    fn read(&self, path: &Path) -> Result<Option<Grant>, GrantError> {
        self.directory.read(path, |grant: &Grant| grant.format, FORMAT)
    }
}

fn others(grant: &Grant, asked: &PodContainer) -> GrantError {
    let owner = match (&grant.holder, grant.candidates.first()) {
        (Some(owner), _) | (None, Some(owner)) => format!(": it is {owner}'s"),
        (None, None) => String::new(),
    };
    GrantError::Others { asked: asked.clone(), owner }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use cgpu_core::request::grant::GrantedGpu;

    fn container(uid: &str, name: &str) -> PodContainer {
        let text = str::to_owned;
        PodContainer {
            namespace: text("default"),
            pod: format!("pod-{uid}"),
            uid: text(uid),
            container: text(name),
        }
    }

    fn grant(token: char, devices: &[&str], candidates: &[PodContainer]) -> Grant {
        Grant {
            format: FORMAT,
            token: token.to_string().repeat(32),
            resource: "aliyun.com/gpu-mem".to_owned(),
            devices: devices.iter().map(|id| (*id).to_owned()).collect(),
            gpus: vec![GrantedGpu { uuid: "GPU-a".to_owned(), bytes: Some(1 << 30) }],
            weight: None,
            unenforced: false,
            candidates: candidates.to_vec(),
            holder: None,
            variables: [].into(),
            shares: Vec::new(),
        }
    }

    fn place() -> (tempfile::TempDir, Grants) {
        let directory = tempfile::tempdir().unwrap();
        let grants = Grants::at(&directory.path().join("grants"));
        (directory, grants)
    }

    /// A token serves the first container creation, and the record serves all others.
    #[test]
    fn token_serves_first_creation_and_record_the_others() {
        let (_directory, grants) = place();
        let (one, other) = (container("u1", "main"), container("u2", "main"));
        let token = "a".repeat(32);
        let find = |token: Option<&str>, who: &PodContainer| {
            let found = grants.find(token, Some(who)).map_err(|error| error.to_string())?;
            Ok(found.map(|grant| grant.token))
        };
        assert_eq!(find(None, &one), Ok(None));
        let refused: Result<Option<String>, String> = find(Some(&token), &one);
        assert!(refused.unwrap_err().contains("names no grant of this node"));
        grants.give(&grant('a', &["d-0"], &[one.clone(), other.clone()])).unwrap();
        assert_eq!(find(Some(&token), &other), Ok(Some(token.clone())), "either may be meant");
        grants.take(&token, &one).unwrap();
        assert!(find(Some(&token), &other).unwrap_err().contains("names no grant"));
        for token in [Some(&*token), None, Some("")] {
            assert_eq!(find(token, &one), Ok(Some("a".repeat(32))), "it is made again");
            grants.take(token.unwrap_or_default(), &one).unwrap();
        }
        assert_eq!(find(None, &container("u1", "side")), Ok(None));
        // A kubelet that has forgotten gives again, and the newer word counts.
        grants.give(&grant('b', &["d-1"], std::slice::from_ref(&one))).unwrap();
        let newer = "b".repeat(32);
        assert_eq!(find(None, &one), Ok(Some(token)), "until the container comes with it");
        grants.take(&newer, &one).unwrap();
        assert_eq!(find(None, &one), Ok(Some(newer)));
        assert_eq!(grants.all().unwrap().len(), 1);
    }

    #[test]
    fn a_token_of_anothers_is_refused_in_words() {
        let (_directory, grants) = place();
        let one = container("u1", "main");
        grants.give(&grant('a', &["d-0"], std::slice::from_ref(&one))).unwrap();
        let token = "a".repeat(32);
        let why = |token: &str, who: Option<&PodContainer>| {
            grants.find(Some(token), who).unwrap_err().to_string()
        };
        let reported = why(&token, Some(&container("u2", "main")));
        assert_eq!(
            reported,
            "CGPU_GRANT names a grant that isn't container main of pod default/pod-u2's: it is \
             container main of pod default/pod-u1's; take the variable out of the pod"
        );
        assert!(why(&token, None).contains("this container is no pod's"));
        assert!(why("../lock", Some(&one)).contains("is no grant's name"));
        assert!(grants.find(None, None).unwrap().is_none());
        assert!(grants.find(Some(""), None).unwrap().is_none(), "an image's empty variable");
    }

    #[test]
    fn devices_given_again_end_another_pods_grant() {
        let (_directory, grants) = place();
        let (init, main) = (container("u1", "init"), container("u1", "main"));
        let pod = [init.clone(), main.clone()];
        grants.give(&grant('a', &["d-0", "d-1"], &pod)).unwrap();
        grants.take(&"a".repeat(32), &init).unwrap();
        grants.give(&grant('b', &["d-1"], &pod)).unwrap();
        assert_eq!(
            grants.all().unwrap().len(),
            2,
            "a pod's init container leaves its devices to others"
        );
        grants.give(&grant('c', &["d-1"], &[container("u2", "main")])).unwrap();
        let left: Vec<_> = grants.all().unwrap().into_iter().map(|grant| grant.token).collect();
        assert_eq!(left, ["c".repeat(32)]);
        let ended = grants.end(|grant| grant.candidates[0].uid == "u2").unwrap();
        assert_eq!((ended.len(), grants.all().unwrap().len()), (1, 0));
    }

    #[test]
    fn what_others_could_have_written_is_not_believed() {
        let (directory, grants) = place();
        let one = container("u1", "main");
        grants.give(&grant('a', &["d-0"], std::slice::from_ref(&one))).unwrap();
        let (place, token) = (directory.path().join("grants"), "a".repeat(32));
        let file = place.join(format!("{token}.json"));
        let chmod = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap()
        };
        let why = || grants.find(Some(&token), Some(&one)).unwrap_err().to_string();
        chmod(&place, 0o777);
        assert!(why().contains("grants can't be trusted: others may write to it"), "{}", why());
        chmod(&place, 0o700);
        chmod(&file, 0o666);
        assert!(why().contains(".json can't be trusted: others may write to it"), "{}", why());
        let text = fs::read_to_string(&file).unwrap();
        fs::remove_file(&file).unwrap();
        let elsewhere = directory.path().join("elsewhere");
        fs::write(&elsewhere, text).unwrap();
        symlink(&elsewhere, &file).unwrap();
        assert!(grants.find(Some(&token), Some(&one)).is_err(), "a link");
        fs::remove_file(&file).unwrap();
        fs::write(&file, "{}").unwrap();
        chmod(&file, 0o600);
        assert!(why().contains("is no record of a grant"), "{}", why());
        fs::remove_dir_all(&place).unwrap();
        symlink(directory.path(), &place).unwrap();
        assert!(why().contains("it is no directory"), "{}", why());
    }

    /// Of many containers that come with one token, one gets the grant.
    #[test]
    fn only_one_concurrent_container_gets_a_grant() {
        let (_directory, grants) = place();
        let all: Vec<PodContainer> =
            (0..8).map(|at| container(&format!("u{at}"), "main")).collect();
        grants.give(&grant('a', &["d-0"], &all)).unwrap();
        let token = "a".repeat(32);
        let (grants, token) = (&grants, &token);
        let taken: Vec<bool> = std::thread::scope(|scope| {
            let take = |who| scope.spawn(move || grants.take(token, who).is_ok());
            let threads: Vec<_> = all.iter().map(take).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(taken.iter().filter(|taken| **taken).count(), 1);
        assert_eq!(grants.all().unwrap().len(), 1);
    }
}
